"""An asynchronous trainer: reads each rollout as soon as it has ended, from a stream of lines.

Its answer is read as it arrives, so it has the client of requests: that of FastHttpUser fills its buffer first.
"""

import time
from collections.abc import Callable

from locust import HttpUser, task
from locust.clients import ResponseContextManager
from requests.exceptions import RequestException

from rollout_client import RolloutError, SampleResult, StreamBroken
from rollout_client.calls.ndjson import NdjsonReader
from rollout_client.errors import error_of_response
from rollout_load.outcomes import Outcome, outcome_of_error, outcome_of_samples
from rollout_load.summary import FIRST_METHOD
from rollout_load.users.base import LONGEST_ANSWER_S, POOL, LoadUser

NDJSON = "application/x-ndjson"


class StreamReader(LoadUser, HttpUser):
    kind = "streaming"

    @task
    def read(self) -> None:
        options = self.options
        expected = options.batch_samples * options.group_size
        body = self.body(POOL.some(options.batch_samples), options.group_size, options.max_turns, "train")
        began = time.perf_counter()
        with self.client.post(
            "/rollout",
            json=body,
            name=self.entry("/rollout"),
            headers={**self.key_headers(), "Accept": NDJSON},
            stream=True,
            timeout=LONGEST_ANSWER_S,
            catch_response=True,
        ) as response:
            outcome = outcome_of_stream(response, expected, lambda: self.first(time.perf_counter() - began))
            # locust's own time ends with the headers.
            response.request_meta["response_time"] = (time.perf_counter() - began) * 1000
            self.count(outcome, response)
        self.obey(outcome)

    def first(self, seconds: float) -> None:
        """Enters the time to the first finished rollout into locust's tables."""
        self.environment.events.request.fire(
            request_type=FIRST_METHOD,
            name=self.entry("first finished rollout"),
            response_time=seconds * 1000,
            response_length=0,
            exception=None,
            context={},
        )


def outcome_of_stream(response: ResponseContextManager, expected: int, at_first: Callable[[], None]) -> Outcome:
    """Reads the stream to its end; calls `at_first` when the first rollout has arrived."""
    if response.status_code == 0:
        return Outcome().with_error("unreachable", "The service did not answer.")
    if response.status_code != 200:
        return outcome_of_error(error_of_response(response.status_code, response.headers, response.content))
    reader = NdjsonReader(expected)
    samples: list[SampleResult] = []
    try:
        for chunk in response.iter_content(chunk_size=None):
            for _, sample in reader.feed(chunk):
                if not samples:
                    at_first()
                samples.append(sample)
        reader.end()
    except RolloutError as error:
        return outcome_of_error(error, outcome_of_samples(samples))
    except RequestException as error:
        return outcome_of_error(StreamBroken(f"The stream broke off: {error}"), outcome_of_samples(samples))
    return outcome_of_samples(samples)
