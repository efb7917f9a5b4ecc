"""Users of a load test: a base class, then a class for each kind of `--classes`."""

import logging
import random
import time
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import httpx
from locust import HttpUser, User, constant, task
from locust.clients import ResponseContextManager
from locust.contrib.fasthttp import FastHttpUser
from requests.exceptions import RequestException

from rollout_client import RolloutClient, RolloutError, SampleResult, StreamBroken
from rollout_client.calls.ndjson import NdjsonReader
from rollout_client.calls.options import key_headers
from rollout_load.options import DEFAULT_HOST, LoadOptions, load_options
from rollout_load.outcomes import (
    Json,
    LoadOutcome,
    LoadTotals,
    kind_of,
    outcome_of_call,
    outcome_of_error,
    outcome_of_failure,
    outcome_of_response,
    outcome_of_samples,
)
from rollout_load.samples import Sample, SamplePool
from rollout_load.summary import FIRST_METHOD, PUSH_METHOD, entry_name

logger = logging.getLogger(__name__)
POOL = SamplePool()
TOTALS = LoadTotals()
"""Shared by all users of this process."""
LONGEST_ANSWER_S = 1800.0
LONGEST_PAUSE_S = 30.0
"""Longest wait for a service that is full, whatever its `Retry-After` says."""
SEEDS = 2**63
_shown: set[str] = set()


class CaughtResponse(Protocol):
    """A response of locust whose success is decided in a `with` block."""

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

    def count(self, outcome: LoadOutcome, response: CaughtResponse) -> None:
        """Counts the outcome of a response, within its `with` block."""
        TOTALS.add(outcome, time.time())
        if failure := outcome.failure:
            response.failure(failure)
            if failure not in _shown:
                _shown.add(failure)
                logger.warning("%s failed with %s, here first: %s", self.kind, failure, outcome.message)

    def report(self, method: str, what: str, seconds: float, exception: Exception | None = None) -> None:
        """Enters a time that is not a request of locust's clients into its tables."""
        self.environment.events.request.fire(
            request_type=method,
            name=self.entry(what),
            response_time=seconds * 1000,
            response_length=0,
            exception=exception,
            context={},
        )

    def wait_retry_after(self, outcome: LoadOutcome) -> None:
        """Waits as long as a service that is full asks for."""
        if outcome.retry_after_s:
            # locust has patched it with gevent: other users go on.
            time.sleep(min(outcome.retry_after_s, LONGEST_PAUSE_S))


class FastLoadUser(LoadUser, FastHttpUser):
    """A user with locust's fast client, which takes a fifth of the CPU time of `HttpUser`'s and reads whole answers."""

    abstract = True
    network_timeout = LONGEST_ANSWER_S

    def on_start(self) -> None:
        self.headers = self.key_headers()

    def post_rollout(self, body: dict[str, Any]) -> None:
        """Posts `body` and counts the outcome."""
        expected = len(body["samples"]) * body["num_generations"]
        name = self.entry("/rollout")
        with self.client.post("/rollout", json=body, headers=self.headers, name=name, catch_response=True) as response:
            content = response.content or b""
            outcome = outcome_of_response(response.status_code, response.headers or {}, content, expected)
            self.count(outcome, response)
        self.wait_retry_after(outcome)


FOLLOW_UP = {"role": "user", "content": "Go on."}
Headers = dict[str, str]


class AgentSession(FastLoadUser):
    kind = "agent"

    @task
    def session(self) -> None:
        [sample] = POOL.some(1)
        session = self.call("POST", "/v1/sessions", "/v1/sessions", self.headers, {"sample": sample})
        if session is None:
            return
        key = {"Authorization": f"Bearer {session['api_key']}"}
        self.converse(session["base_url"], key, sample.get("messages") or [FOLLOW_UP])
        path = f"/v1/sessions/{session['id']}"
        self.call("POST", f"{path}/reward", "/v1/sessions/{id}/reward", self.headers, {"reward": 0.0})
        self.call("DELETE", path, "/v1/sessions/{id}", self.headers)

    def converse(self, base_url: str, key: Headers, messages: list[Json]) -> None:
        """Makes `--agent-calls` calls of one conversation; ends with the first that fails."""
        messages = list(messages)
        for _ in range(self.options.agent_calls):
            body = {"messages": messages, "max_tokens": self.options.max_new_tokens}
            answer = self.call("POST", f"{base_url}/v1/chat/completions", "/v1/chat/completions", key, body)
            if answer is None:
                return
            content = answer["choices"][0]["message"]["content"] or ""
            messages += [{"role": "assistant", "content": content}, FOLLOW_UP]

    def call(self, method: str, url: str, shown: str, headers: Headers, body: Json | None = None) -> Json | None:
        """Makes one call and counts its outcome. Returns the answer, or `None` if it is an error."""
        with self.client.request(
            method, url, json=body, headers=headers, name=self.entry(shown), catch_response=True
        ) as response:
            outcome, answer = outcome_of_call(response.status_code, response.headers or {}, response.content or b"")
            self.count(outcome, response)
        self.wait_retry_after(outcome)
        return answer


class GroupBatch(FastLoadUser):
    kind = "groups"

    @task
    def batch(self) -> None:
        options = self.options
        self.post_rollout(self.body(POOL.some(options.batch_samples), options.group_size, options.max_turns, "train"))


class Interactive(FastLoadUser):
    kind = "interactive"

    @task
    def one(self) -> None:
        self.post_rollout(self.body(POOL.some(1), 1, self.options.max_turns, "interactive"))


class MultiTurn(FastLoadUser):
    kind = "multi-turn"

    @task
    def conversation(self) -> None:
        self.post_rollout(self.body([POOL.long()], 1, self.options.long_turns, "train"))


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
        exception = None if failure is None else PushFailed(failure)
        self.report(PUSH_METHOD, "weights", time.perf_counter() - began, exception)
        time.sleep(self.options.push_every_s)


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
            outcome = outcome_of_stream(
                response,
                expected,
                lambda: self.report(FIRST_METHOD, "first finished rollout", time.perf_counter() - began),
            )
            # locust's own time ends with the headers.
            response.request_meta["response_time"] = (time.perf_counter() - began) * 1000
            self.count(outcome, response)
        self.wait_retry_after(outcome)


def outcome_of_stream(response: ResponseContextManager, expected: int, at_first: Callable[[], None]) -> LoadOutcome:
    """Reads the stream to its end; calls `at_first` when the first rollout has arrived."""
    if response.status_code != 200:
        return outcome_of_failure(response.status_code, response.headers, response.content)
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
