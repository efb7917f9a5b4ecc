"""What all users have: the key, the options of the run, samples, and how an outcome is counted."""

import logging
import random
import time
from typing import Any, ClassVar, Protocol

import httpx
from locust import User, constant
from locust.contrib.fasthttp import FastHttpUser

from rollout_client.api_key import key_headers
from rollout_load.options import DEFAULT_HOST, LoadOptions, load_options
from rollout_load.outcomes import Outcome, outcome_of_response
from rollout_load.samples import Sample, SamplePool
from rollout_load.summary import entry_name
from rollout_load.totals import LoadTotals

logger = logging.getLogger(__name__)
POOL = SamplePool()
TOTALS = LoadTotals()
"""Of this process: all its users draw from the one and count in the other."""
LONGEST_ANSWER_S = 1800.0
LONGEST_PAUSE_S = 30.0
"""A service that is full says when to come back; the run goes on before that if it says later."""
SEEDS = 2**63
_shown: set[str] = set()


class CaughtResponse(Protocol):
    """A response of locust that a `with` block judges."""

    def failure(self, reason: str) -> None: ...


class LoadUser(User):
    """Posts one request after the other, without pause."""

    abstract = True
    kind: ClassVar[str]
    """Its name in `--classes` and in the tables."""
    host = DEFAULT_HOST
    wait_time = constant(0)

    @property
    def options(self) -> LoadOptions:
        assert self.environment.parsed_options is not None
        return load_options(self.environment.parsed_options)

    def key_headers(self) -> dict[str, str]:
        return dict(key_headers(None, httpx.URL(self.host or DEFAULT_HOST)))

    def entry(self, what: str) -> str:
        return entry_name(what, self.kind)

    def body(self, samples: list[Sample], num_generations: int, max_turns: int, priority: str) -> dict[str, Any]:
        return {
            "samples": samples,
            "num_generations": num_generations,
            "sampling": {"max_new_tokens": self.options.max_new_tokens, "seed": random.randrange(SEEDS)},
            "max_rollout_turns": max_turns,
            "priority": priority,
        }

    def count(self, outcome: Outcome, response: CaughtResponse) -> None:
        """Counts the outcome of a response, within its `with` block."""
        TOTALS.add(outcome, time.time())
        if failure := outcome.failure:
            response.failure(failure)
            if failure not in _shown:
                _shown.add(failure)
                logger.warning("%s failed with %s, here first: %s", self.kind, failure, outcome.message)

    def obey(self, outcome: Outcome) -> None:
        """Waits as long as a service that is full asks for."""
        if outcome.retry_after_s:
            # locust has made it gevent's: other users go on.
            time.sleep(min(outcome.retry_after_s, LONGEST_PAUSE_S))


class FastLoadUser(LoadUser, FastHttpUser):
    """Its client takes a fifth of the processor time of `HttpUser`'s, and reads whole answers."""

    abstract = True
    network_timeout = LONGEST_ANSWER_S

    def on_start(self) -> None:
        self.headers = self.key_headers()

    def roll_out(self, body: dict[str, Any]) -> None:
        """Posts `body` and counts what comes back."""
        expected = len(body["samples"]) * body["num_generations"]
        name = self.entry("/rollout")
        with self.client.post("/rollout", json=body, headers=self.headers, name=name, catch_response=True) as response:
            content = response.content or b""
            outcome = outcome_of_response(response.status_code, response.headers or {}, content, expected)
            self.count(outcome, response)
        self.obey(outcome)
