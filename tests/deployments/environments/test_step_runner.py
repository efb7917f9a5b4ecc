"""The steps of one replica in virtual time: their queue, their time limit and their abortion."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from deployments.environments.step_runner import StepRunner
from deployments.failures import EnvironmentShuttingDown, RolloutFailure, TurnTimedOut
from deployments.protocols.environments import StepRequest
from rollout_env import ChatMessage, StepOutcome
from tests import virtual_time
from tests.fakes.environment import StepsAlone
from tests.service.scripted import outcome


class Duration(BaseModel):
    seconds: float
    ignores_cancellation: bool = False


class TimedEnvironment(StepsAlone):
    """A step takes as long as its sample says."""

    ExtraEnvInfo = Duration

    def __init__(self, max_concurrent_steps: int | None = None) -> None:
        self.max_concurrent_steps = max_concurrent_steps
        self.began_at: list[float] = []
        self.cancelled_at: list[float] = []

    async def step(self, message_log: list[ChatMessage], extra_env_info: Duration) -> StepOutcome:
        self.began_at.append(virtual_time.now())
        ends_at = virtual_time.now() + extra_env_info.seconds
        while virtual_time.now() < ends_at:
            try:
                await asyncio.sleep(ends_at - virtual_time.now())
            except asyncio.CancelledError:
                self.cancelled_at.append(virtual_time.now())
                if not extra_env_info.ignores_cancellation:
                    raise
        return outcome("done")


STEPS = [("done", 1), ("running", 60), ("waiting", 60)]


def request(step_id: str, seconds: float, **state: Any) -> StepRequest:
    return StepRequest([], {"seconds": seconds, **state}, step_id=step_id)


@virtual_time.synchronous
async def results_of(
    environment: TimedEnvironment, timeout_s: float | None, *requests: StepRequest
) -> list[tuple[float, StepOutcome | RolloutFailure]]:
    """When each step has its result, and which."""

    async def result_of(runner: StepRunner, step: StepRequest) -> tuple[float, StepOutcome | RolloutFailure]:
        result = await runner.start(step, set())
        return virtual_time.now(), result

    runner = StepRunner(environment, "timed", timeout_s)
    results = await asyncio.gather(*(result_of(runner, step) for step in requests))
    await virtual_time.settled()
    assert runner.in_progress == 0
    return results


def test_a_step_that_takes_too_long_is_cancelled_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    environment = TimedEnvironment()
    [(ended_at, failure)] = results_of(environment, 2.5, request("a", 60))
    assert (ended_at, type(failure)) == (2.5, TurnTimedOut)
    assert str(failure) == "The environment's step took longer than 2.5 s."
    assert environment.cancelled_at == [2.5]
    assert caplog.messages == ["A step of task timed failed: The environment's step took longer than 2.5 s."]


def test_a_step_that_ignores_its_cancellation_keeps_no_slot() -> None:
    environment = TimedEnvironment(max_concurrent_steps=1)
    stubborn, next_ = results_of(environment, 2.5, request("a", 60, ignores_cancellation=True), request("b", 1))
    assert (stubborn[0], type(stubborn[1])) == (2.5, TurnTimedOut)
    assert next_ == (3.5, outcome("done"))


def test_the_time_limit_begins_when_the_step_leaves_the_queue() -> None:
    environment = TimedEnvironment(max_concurrent_steps=1)
    results = results_of(environment, 2.5, *(request(f"{number}", 2) for number in range(4)))
    assert results == [(2.0, outcome("done")), (4.0, outcome("done")), (6.0, outcome("done")), (8.0, outcome("done"))]


def test_requests_take_turns_and_the_steps_of_each_keep_their_order() -> None:
    names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    steps = [StepRequest([], {"seconds": 1}, name[0], step_id=name) for name in names]
    results = results_of(TimedEnvironment(max_concurrent_steps=1), None, *steps)
    assert [ended_at for ended_at, _ in results] == [1, 2, 5, 7, 3, 6, 4]


async def test_an_aborted_step_is_cancelled_and_one_that_waits_is_never_begun() -> None:
    environment = TimedEnvironment(max_concurrent_steps=1)

    runner = StepRunner(environment, "timed", None)
    first, waiting, last = (runner.start(request(step_id, 5), set()) for step_id in "abc")
    await asyncio.sleep(1)
    assert runner.in_progress == 3
    runner.abort(["b", "unknown"])
    await asyncio.sleep(1)
    runner.abort(["a"])
    assert await last == outcome("done")
    assert first.cancelled()
    assert waiting.cancelled()
    assert environment.began_at == [0, 2]
    assert environment.cancelled_at == [2]


async def test_steps_of_a_replica_that_hands_off_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    environment = TimedEnvironment(max_concurrent_steps=2)
    caplog.set_level("INFO")

    runner = StepRunner(environment, "timed", None)
    done, running, waiting = (runner.start(request(step_id, seconds), set()) for step_id, seconds in STEPS)
    await asyncio.sleep(2)
    runner.hand_off()
    later = runner.start(request("later", 0), set())
    assert done.result() == outcome("done")
    for given_up in (running, waiting, later):
        failure = given_up.result()
        assert isinstance(failure, EnvironmentShuttingDown)
        assert str(failure) == "The replica of environment 'timed' is being shut down."
    await virtual_time.settled()
    assert runner.in_progress == 0
    assert environment.began_at == [0, 0, 1]
    assert environment.cancelled_at == [2, 2]
    assert caplog.messages == ["2 steps of task timed continue at other replicas."]


async def test_the_retry_of_a_step_is_what_its_id_aborts() -> None:

    runner = StepRunner(TimedEnvironment(), "timed", None)
    first = runner.start(request("a", 1), set())
    retry = runner.start(request("a", 60), set())
    assert await first == outcome("done")
    await virtual_time.settled()
    runner.abort(["a"])
    await asyncio.gather(retry, return_exceptions=True)
    assert retry.cancelled()
