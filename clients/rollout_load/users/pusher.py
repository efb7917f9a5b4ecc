"""A trainer that pushes weights while others play: one user, which changes the service's policy.

What is pushed is `--push-weights`, each time as a new version. The client needs numpy and zstandard for it.
"""

import time

from locust import task

from rollout_client import RolloutClient, RolloutError
from rollout_load.outcomes import kind_of
from rollout_load.summary import PUSH_METHOD
from rollout_load.users.base import TOTALS, LoadUser


class PushFailed(Exception):
    """A push failed; the message is the kind of its error."""


class WeightPusher(LoadUser):
    kind = "pusher"
    fixed_count = 1

    @task
    def push(self) -> None:
        began, failure = time.perf_counter(), None
        try:
            with RolloutClient(self.host, headers=self.key_headers() or None) as client:
                client.push_weights(self.options.push_weights)
            TOTALS.pushes += 1
        except RolloutError as error:
            failure = kind_of(error)
            TOTALS.errors[failure] += 1
        self.environment.events.request.fire(
            request_type=PUSH_METHOD,
            name=self.entry("weights"),
            response_time=(time.perf_counter() - began) * 1000,
            response_length=0,
            exception=None if failure is None else PushFailed(failure),
            context={},
        )
        time.sleep(self.options.push_every_s)
