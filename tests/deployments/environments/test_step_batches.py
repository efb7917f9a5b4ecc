"""Steps of an environment that judges many responses at once, and of one whose step is plain."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from deployments.environments.step_runner import StepRunner
from deployments.failures import EnvironmentRejected, RolloutFailure, TurnTimedOut
from deployments.protocols.environments import StepRequest
from rollout_env import ChatMessage, SampleRejected, StartOutcome, StepOutcome, TaskEnvironment
from tests import virtual_time
from tests.fakes.environment import StepsAlone
from tests.service.scripted import outcome


class Word(BaseModel):
    word: str


class BatchEnvironment(StepsAlone):
    """Answers each response with its word; raises on the word "bad", and never ends with the word "hang"."""

    ExtraEnvInfo = Word

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.cancelled: list[list[str]] = []

    async def step_batch(self, message_logs: list[list[ChatMessage]], extra_env_infos: list[Word]) -> list[StepOutcome]:
        words = [info.word for info in extra_env_infos]
        self.batches.append(words)
        assert len(message_logs) == len(words)
        try:
            await asyncio.sleep(60 if "hang" in words else 1)
        except asyncio.CancelledError:
            self.cancelled.append(words)
            raise
        if "bad" in words:
            raise SampleRejected("The word is bad.")
        if "short" in words:
            return []
        return [outcome(word) if word != "dict" else {} for word in words]  # type: ignore[misc]


def requests(*words: Any) -> list[StepRequest]:
    return [StepRequest([], {"word": word}, step_id=f"{number}") for number, word in enumerate(words)]


def results_of(
    environment: TaskEnvironment,
    *words: Any,
    timeout_s: float | None = None,
    run_in: Callable[..., Any] = virtual_time.run,
) -> list[StepOutcome | RolloutFailure]:
    async def run() -> list[StepOutcome | RolloutFailure]:
        runner = StepRunner(environment, "batch", timeout_s)
        results = await asyncio.gather(*(runner.start(request, set()) for request in requests(*words)))
        await virtual_time.settled()
        return results

    results: list[StepOutcome | RolloutFailure] = run_in(run())
    return results


BAD = "EnvironmentRejected: The word is bad."
NO_WORD = "EnvironmentRejected: The environment cannot take this sample: extra_env_info.word: Input should be a valid"
NO_OUTCOME = "EnvironmentBroken: The environment's outcome is not valid: step must return a StepOutcome, got dict."
TOO_FEW = (
    "EnvironmentBroken: The environment's outcome is not valid: step_batch must return a list with one StepOutcome"
)


@pytest.mark.parametrize(
    ("words", "limit", "expected", "batches"),
    [
        (["a", "b", "c"], None, ["a", "b", "c"], [["a", "b", "c"]]),
        (["a", "b", "c"], 2, ["a", "b", "c"], [["a", "b"], ["c"]]),
        (["a", "bad", "c"], None, ["a", BAD, "c"], [["a", "bad", "c"], ["a"], ["bad"], ["c"]]),
        (["a", 3], None, ["a", NO_WORD], [["a"]]),
        (["a", "dict"], None, ["a", NO_OUTCOME], [["a", "dict"]]),
        (["a", "short"], None, [TOO_FEW, TOO_FEW], [["a", "short"]]),
    ],
)
def test_the_steps_of_one_moment_are_one_call_and_each_has_its_own_result(
    words: list[Any], limit: int | None, expected: list[str], batches: list[list[str]]
) -> None:
    environment = BatchEnvironment()
    environment.max_concurrent_steps = limit
    for result, said in zip(results_of(environment, *words), expected, strict=True):
        assert result == outcome(said) or f"{type(result).__name__}: {result}".startswith(said)
    assert environment.batches == batches


def test_a_batch_is_cancelled_when_all_its_steps_have_timed_out() -> None:
    environment = BatchEnvironment()
    results = results_of(environment, "a", "hang", timeout_s=5)
    assert [type(result) for result in results] == [TurnTimedOut, TurnTimedOut]
    assert environment.cancelled == [["a", "hang"]]


async def test_an_aborted_step_leaves_the_others_of_its_batch_alone() -> None:
    environment = BatchEnvironment()

    runner = StepRunner(environment, "batch", None)
    first, second = (runner.start(request, set()) for request in requests("a", "b"))
    await asyncio.sleep(0.5)
    runner.abort(["0"])
    assert await second == outcome("b")
    assert first.cancelled()
    assert environment.cancelled == []


class StartingEnvironment(BatchEnvironment):
    async def start(self, message_log: list[ChatMessage], extra_env_info: Word) -> StartOutcome:
        await asyncio.sleep(1)
        if extra_env_info.word == "bad":
            raise SampleRejected("The word is bad.")
        return StartOutcome(metadata={"word": f"{extra_env_info.word} of {len(message_log)}"})


def test_samples_are_started_with_the_limits_and_failures_of_steps() -> None:
    environment = StartingEnvironment()
    environment.max_concurrent_steps = 1

    async def run(timeout_s: float | None) -> list[StepOutcome | RolloutFailure]:
        runner = StepRunner(environment, "starts", timeout_s)
        starts = [runner.start(replace(request, is_start=True), set()) for request in requests("a", "bad", "c")]
        return await asyncio.gather(*starts)

    first, bad, last = virtual_time.run(run(None))
    assert first == StepOutcome([], 0.0, False, metadata={"word": "a of 0"})
    assert last == StepOutcome([], 0.0, False, metadata={"word": "c of 0"})
    assert isinstance(bad, EnvironmentRejected)
    assert {type(result) for result in virtual_time.run(run(0.5))} == {TurnTimedOut}


class PlainEnvironment(StepsAlone):
    """Blocks until as many steps as expected run at once."""

    ExtraEnvInfo = Word

    def __init__(self, at_once: int = 1) -> None:
        self.barrier = threading.Barrier(at_once, timeout=40)

    def step(self, message_log: list[ChatMessage], extra_env_info: Word) -> StepOutcome:
        match extra_env_info.word:
            case "bad":
                raise SampleRejected("The word is bad.")
            case "stop":
                raise StopIteration
            case "exit":
                raise SystemExit(2)
        self.barrier.wait()
        assert threading.current_thread() is not threading.main_thread()
        return outcome(extra_env_info.word)


def test_steps_of_a_plain_step_run_at_once_and_off_the_event_loop() -> None:
    results = results_of(PlainEnvironment(at_once=3), "a", "b", "c", run_in=asyncio.run)
    assert results == [outcome("a"), outcome("b"), outcome("c")]


def test_a_plain_step_runs_in_at_most_64_threads_at_once() -> None:
    environment = PlainEnvironment(at_once=64)
    assert len(results_of(environment, *"a" * 128, run_in=asyncio.run)) == 128
    assert environment.barrier.n_waiting == 0


@pytest.mark.parametrize(
    ("word", "failure"),
    [
        ("bad", "The word is bad."),
        ("stop", "The environment raised RuntimeError: The function raised StopIteration."),
        ("exit", "The environment raised SystemExit: 2"),
    ],
)
def test_what_a_plain_step_raises_fails_its_sample(word: str, failure: str) -> None:
    [result] = results_of(PlainEnvironment(), word, run_in=asyncio.run)
    assert str(result) == failure
