"""Users of a load test over the client: a base class, then a class for each kind of `--classes`."""

import logging
import random
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import httpx
from locust import User, constant, events, task
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from rollout_client import RolloutClient, RolloutError, SampleInput, SampleResult, ServiceUnreachable
from rollout_client.errors import StatusError, error_of_response
from rollout_load.report import FIRST, TOTALS, shares

SAMPLES_PER_TASK = 64
RETRIES = 3
"""Retries of reading the samples."""
LONGEST_ANSWER_S = 1800.0
LONGEST_PAUSE_S = 30.0
"""Longest wait for a service that is full, whatever its `Retry-After` says."""
SEEDS = 2**63
PROBLEM = "urn:rollout:problem:"
FOLLOW_UP = {"role": "user", "content": "Go on."}
SAMPLES: dict[str, list[SampleInput]] = {}
"""By task, shared by all users of this process."""
_shown: set[str] = set()
logger = logging.getLogger(__name__)


def kind_of(error: RolloutError) -> str:
    """The name of a problem's type, such as `overloaded`, or of the client's error, such as `stream-broken`."""
    if isinstance(error, StatusError):
        name = error.problem.type.removeprefix(PROBLEM)
        return name if name != error.problem.type else f"status-{error.status}"
    return re.sub(r"(?<!^)(?=[A-Z])", "-", type(error).__name__).lower()


class LoadUser(User):
    """Posts one request after the other, without pause."""

    abstract = True
    kind: ClassVar[str]
    """Its name in `--classes` and in the tables."""
    host = "http://127.0.0.1:8000"
    wait_time = constant(0)

    def on_start(self) -> None:
        # What fails is counted, not tried again.
        self.rollouts = RolloutClient(self.host, retries=0, timeout_s=LONGEST_ANSWER_S)
        self.options: Any = self.environment.parsed_options

    def on_stop(self) -> None:
        self.rollouts.close()

    def request(self, count: int, num_generations: int, max_turns: int, priority: str) -> dict[str, Any]:
        """Arguments of a request of so many samples of one task."""
        return {
            "samples": random.choices(random.choice([*SAMPLES.values()]), k=count),
            "num_generations": num_generations,
            "sampling": {"max_new_tokens": self.options.max_new_tokens, "seed": random.randrange(SEEDS)},
            "max_rollout_turns": max_turns,
            "priority": priority,
        }

    def play(self, *request: Any) -> None:
        self.timed("/rollout", lambda: self.rollouts.rollout(**self.request(*request)).samples)

    def timed(self, what: str, work: Callable[[], Iterable[SampleResult]]) -> None:
        """Counts the rollouts that `work` gives, and tells locust how long it took and which errors it had."""
        began, errors, pause_s = time.perf_counter(), dict[str, str](), 0.0
        try:
            for sample in work():
                TOTALS.add(sample)
                if sample.error is not None:
                    TOTALS.errors[sample.error.kind] += 1
                    errors[sample.error.kind] = sample.error.message
        except RolloutError as error:
            TOTALS.errors[kind_of(error)] += 1
            errors[kind_of(error)] = str(error)
            pause_s = (error.retry_after_s or 0.0) if isinstance(error, StatusError) else 0.0
        for kind in errors.keys() - _shown:
            _shown.add(kind)
            logger.warning("%s failed with %s, here first: %s", self.kind, kind, errors[kind])
        # The kinds alone, because locust keeps a line for each text.
        self.report("POST", what, began, Exception(", ".join(sorted(errors))) if errors else None)
        # locust has patched it with gevent: other users go on.
        time.sleep(min(pause_s, LONGEST_PAUSE_S))

    def report(self, method: str, what: str, began: float, exception: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type=method,
            name=f"{what} ({self.kind})",
            response_time=1000 * (time.perf_counter() - began),
            response_length=0,
            exception=exception,
            context={},
        )


class Interactive(LoadUser):
    kind = "interactive"

    @task
    def one(self) -> None:
        self.play(1, 1, self.options.max_turns, "interactive")


class GroupBatch(LoadUser):
    kind = "groups"

    @task
    def batch(self) -> None:
        self.play(self.options.batch_samples, self.options.group_size, self.options.max_turns, "train")


class MultiTurn(LoadUser):
    kind = "multi-turn"

    @task
    def conversation(self) -> None:
        self.play(1, 1, self.options.long_turns, "train")


class StreamReader(LoadUser):
    kind = "streaming"

    @task
    def read(self) -> None:
        options = self.options
        request = self.request(options.batch_samples, options.group_size, options.max_turns, "train")

        def streamed() -> Iterable[SampleResult]:
            began = time.perf_counter()
            with self.rollouts.stream(**request) as rollouts:
                for number, sample in enumerate(rollouts):
                    if number == 0:
                        self.report(FIRST, "first finished rollout", began)
                    yield sample

        self.timed("/rollout", streamed)


class AgentSession(LoadUser):
    kind = "agent"

    def on_start(self) -> None:
        super().on_start()
        self.http = httpx.Client(timeout=LONGEST_ANSWER_S)

    @task
    def session(self) -> None:
        [sample] = self.request(1, 1, 1, "train")["samples"]
        messages = [message.model_dump(exclude_unset=True) for message in sample.messages or ()] or [FOLLOW_UP]

        def played() -> Iterable[SampleResult]:
            with self.rollouts.sessions.open(sample=sample) as session:
                for _ in range(self.options.agent_calls):
                    self.timed("/v1/chat/completions", lambda: self.call(session, messages))
                session.reward(0.0)
            TOTALS.count(rollouts=1)
            return ()

        self.timed("/v1/sessions", played)

    def call(self, session: Any, messages: list[dict[str, Any]]) -> Iterable[SampleResult]:
        """Makes the next call of the conversation, which goes on with its answer."""
        body = {"model": "any", "messages": messages, "max_tokens": self.options.max_new_tokens}
        key = {"Authorization": f"Bearer {session.api_key}"}
        try:
            answer = self.http.post(f"{session.base_url}/chat/completions", json=body, headers=key)
        except httpx.HTTPError as error:
            raise ServiceUnreachable(str(error)) from error
        if answer.is_error:
            raise error_of_response(answer.status_code, answer.headers, answer.content)
        fields = answer.json()
        TOTALS.count(turns=1, tokens=fields["usage"]["completion_tokens"])
        content = fields["choices"][0]["message"]["content"] or ""
        messages += [{"role": "assistant", "content": content}, FOLLOW_UP]
        return ()


class WeightPusher(LoadUser):
    kind = "pusher"
    fixed_count = 1

    @task
    def push(self) -> None:
        def pushed() -> Iterable[SampleResult]:
            self.rollouts.push_weights(self.options.push_weights)
            TOTALS.count(pushes=1)
            return ()

        self.timed("/policy/update", pushed)
        time.sleep(self.options.push_every_s)


def choose(environment: Environment, **_: Any) -> None:
    """Leaves the classes of `--classes`, each with its share; a worker is told them by its master."""
    given: Any = environment.parsed_options
    if isinstance(environment.runner, WorkerRunner) or given.user_classes:
        return
    by_kind: dict[str, Any] = {each.kind: each for each in environment.user_classes if issubclass(each, LoadUser)}
    chosen = shares(given.classes, by_kind)
    if "pusher" in chosen and not given.push_weights:
        raise SystemExit("The class pusher needs weights to push: --push-weights FILE_OR_FOLDER")
    environment.user_classes = [by_kind[kind] for kind in chosen]
    for kind, share in chosen.items():
        by_kind[kind].weight = share


def read_samples(environment: Environment, **_: Any) -> None:
    """Reads the samples of the tasks that are played from the service."""
    if isinstance(environment.runner, MasterRunner):
        return
    given: Any = environment.parsed_options
    try:
        with RolloutClient(environment.host or LoadUser.host, retries=RETRIES) as client:
            tasks = [name for name in given.tasks.split(",") if name] or [each.task_name for each in client.tasks()]
            for name in tasks:
                SAMPLES[name] = client.example_samples(name, SAMPLES_PER_TASK, random.randrange(2**31))
    except RolloutError as error:
        # `runner.quit()` would leave locust running until its run time is over.
        raise SystemExit(f"No samples, no test: {error}") from error


events.init.add_listener(choose)
events.test_start.add_listener(read_samples)
