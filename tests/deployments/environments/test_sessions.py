"""The sessions of one replica in virtual time: whose they are, when they are closed, and how many there are."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.environments.step_runner import StepRunner
from deployments.failures import EnvironmentLost, Overloaded, RestartableSessionLost, RolloutFailure, SessionLost
from deployments.protocols.environments import StepRequest
from rollout_env import StepOutcome
from tests import virtual_time
from tests.deployments.environments.counting_sessions import (
    OPENS_WITHIN_S,
    BlockingSessions,
    CountingSessions,
    ForkingSessions,
    step_of,
)


async def until(is_so: Callable[[], bool]) -> None:
    """For what threads do, in true time."""
    while not is_so():
        await asyncio.sleep(0.005)


async def said(runner: StepRunner, request: StepRequest) -> str:
    """The observation of a step that succeeds."""
    result = await runner.start(request, set())
    assert isinstance(result, StepOutcome), result
    return result.observations[0]["content"]


async def failed(runner: StepRunner, request: StepRequest) -> RolloutFailure:
    result = await runner.start(request, set())
    assert isinstance(result, RolloutFailure), result
    return result


async def test_a_session_without_a_step_for_too_long_is_closed() -> None:
    environment = CountingSessions(session_idle_s=10.0)
    runner = StepRunner(environment, "counting", None)
    await said(runner, step_of("a"))
    await asyncio.sleep(6)
    await said(runner, step_of("b"))
    await said(runner, step_of("a", 1))
    await asyncio.sleep(9.9)
    assert environment.closed == []
    await said(runner, step_of("a", 2, step_s=60))
    assert environment.closed == [2]
    await asyncio.sleep(10.1)
    assert environment.closed == [2, 1]
    assert type(await failed(runner, step_of("a", 3))) is RestartableSessionLost


@pytest.mark.parametrize(
    ("lost_session", "first_turn", "kind", "message"),
    [
        ("restart", 0, RestartableSessionLost, "is gone: it must be played anew from its prompt."),
        ("restart", 2, RestartableSessionLost, "is gone: it must be played anew from its prompt."),
        ("fail", 0, SessionLost, "is gone, and with it the state of the rollout."),
    ],
)
async def test_a_later_step_without_a_session_opens_none(
    lost_session: Any, first_turn: int, kind: type[RolloutFailure], message: str
) -> None:
    environment = CountingSessions(lost_session)
    failure = await failed(StepRunner(environment, "counting", None), step_of("a", 2, first_turn=first_turn))
    said = f"The session of the rollout {message}"
    assert (type(failure), str(failure), failure.retryable) == (kind, said, True)
    assert environment.opened == 0


async def test_a_session_that_can_be_opened_again_is_given_the_turns_so_far() -> None:
    assert await said(StepRunner(CountingSessions("reopen"), "counting", None), step_of("a", 2)) == "1:3"


async def test_a_step_that_fails_closes_its_session_and_leaves_others_open() -> None:
    environment = CountingSessions()
    runner = StepRunner(environment, "counting", None)
    for name in "ab":
        await said(runner, step_of(name))
    failure = await failed(runner, step_of("a", 1, fails=True))
    assert (type(failure), str(failure)) == (EnvironmentLost, "The socket was closed.")
    assert type(await failed(runner, step_of("a", 1))) is RestartableSessionLost
    assert await said(runner, step_of("b", 1)) == "2:2"
    assert environment.closed == [1]


@pytest.mark.parametrize("make", [CountingSessions, BlockingSessions])
def test_a_session_whose_step_is_aborted_at_its_opening_does_not_stay_open(make: type[CountingSessions]) -> None:
    environment = make(max_sessions=1)

    async def story(runner: StepRunner) -> None:
        runner.start(step_of("a", opens_late=True), set())
        await until(lambda: environment.opening == 1)
        runner.abort(["a-0"])
        environment.may_open.set()
        assert await said(runner, step_of("b")) in ("1:1", "2:1")
        await until(lambda: environment.opening == 0)
        await until(lambda: environment.open_sessions == 1)
        assert runner.load == 1

    runner = StepRunner(environment, "counting", None)
    asyncio.run(asyncio.wait_for(story(runner), OPENS_WITHIN_S))


async def test_no_more_sessions_are_open_or_being_closed_than_a_replica_may_hold() -> None:
    environment = CountingSessions(max_sessions=2)
    runner = StepRunner(environment, "counting", None)
    open_sessions = list[int]()

    async def rollout(name: str) -> None:
        for turn in range(3):
            await said(runner, step_of(name, turn, step_s=1, close_s=2, ends=turn == 2))
            open_sessions.append(environment.open_sessions)

    await asyncio.gather(*map(rollout, "abcdef"))
    assert virtual_time.now() == 3 * 3 + 2 * 2
    assert (environment.opened, max(open_sessions)) == (6, 2)


async def test_rollouts_that_wait_for_a_session_hold_up_none_that_have_one() -> None:
    runner = StepRunner(CountingSessions(max_sessions=1, max_concurrent_steps=1), "counting", None)
    await said(runner, step_of("a"))
    waiting = [runner.start(step_of(name), set()) for name in "bcd"]
    await virtual_time.settled()
    assert await said(runner, step_of("a", 1, ends=True)) == "1:2"
    await waiting[0]


async def test_a_lockstep_request_that_would_wait_for_itself_is_refused() -> None:
    runner = StepRunner(CountingSessions(max_sessions=1), "counting", None)
    await said(runner, step_of("a", lockstep_id="request"))
    failure = await failed(runner, step_of("b", lockstep_id="request"))
    assert type(failure) is Overloaded
    assert str(failure) == (
        "A replica of task counting holds at most 1 sessions at once, and all rollouts of a request in lockstep "
        "need theirs at the same time. Send fewer rollouts, or choose the schedule async."
    )
    assert await said(runner, step_of("a", 1, lockstep_id="request")) == "1:2"


async def test_a_session_that_does_not_close_gives_its_room_up_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    runner = StepRunner(CountingSessions(max_sessions=1), "counting", None)
    await said(runner, step_of("a", close_s=900, ends=True))
    assert await said(runner, step_of("b")) == "2:1"
    assert virtual_time.now() == 30
    assert caplog.messages == ["A session of task counting was not closed."]


# Forks


async def test_a_fork_is_made_once_and_its_session_is_at_the_turn_of_its_step() -> None:
    environment = ForkingSessions()
    runner = StepRunner(environment, "counting", None)
    texts = await asyncio.gather(*(said(runner, step_of(name, 2, first_turn=2)) for name in "abc"))
    assert texts == ["1:3", "2:3", "3:3"]
    assert await said(runner, step_of("b", 3, first_turn=2)) == "2:4"
    assert type(await failed(runner, step_of("b", 4, first_turn=2, fails=True))) is EnvironmentLost
    assert type(await failed(runner, step_of("b", 4, first_turn=2))) is RestartableSessionLost
    assert (environment.forked, environment.opened) == (3, 3)


async def test_the_retry_of_the_first_step_of_a_fork_forks_again() -> None:
    environment = ForkingSessions()
    runner = StepRunner(environment, "counting", None)
    assert await said(runner, step_of("new")) == "1:1"
    assert environment.forked == 0
    runner.release(["new"])
    opening = await failed(runner, step_of("a", 2, first_turn=2, open_fails=True))
    assert (type(opening), str(opening)) == (EnvironmentLost, "The server does not answer.")
    assert type(await failed(runner, step_of("a", 2, first_turn=2, fails=True))) is EnvironmentLost
    assert await said(runner, step_of("a", 2, first_turn=2)) == "3:3"
    await virtual_time.settled()
    assert environment.forked == 3
    assert environment.open_sessions == 1


ENDS = ("released", "terminated", "failed", "timed out", "aborted", "aborted while opened", "not opened", "idle")


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(ENDS)), min_size=1, max_size=12), st.integers(1, 4))
def test_however_forks_end_sessions_close_once_and_no_room_is_lost(forks: list[tuple[int, str]], most: int) -> None:
    environment = ForkingSessions(max_sessions=most, session_idle_s=100.0)
    environment.may_open.set()

    async def play(runner: StepRunner, name: str, turn: int, end: str) -> None:
        first: Any = {"first_turn": turn}
        match end:
            case "aborted while opened":
                environment.may_open.clear()
                runner.start(step_of(name, turn, opens_late=True, **first), set())
                await virtual_time.settled()
                runner.abort([f"{name}-{turn}"])
                environment.may_open.set()
            case "aborted":
                runner.start(step_of(name, turn, step_s=3, **first), set())
                await asyncio.sleep(1)
                runner.abort([f"{name}-{turn}"])
            case "not opened":
                await failed(runner, step_of(name, turn, open_fails=True, **first))
            case "timed out":
                await failed(runner, step_of(name, turn, step_s=60, **first))
            case "failed":
                await failed(runner, step_of(name, turn, fails=True, **first))
            case "terminated":
                await said(runner, step_of(name, turn, ends=True, **first))
            case _:
                await said(runner, step_of(name, turn, **first))
                if end == "released":
                    await said(runner, step_of(name, turn + 1, **first))
                    runner.release([name])

    async def story() -> None:
        runner = StepRunner(environment, "counting", 5.0)
        await asyncio.gather(*(play(runner, f"r{n}", turn, end) for n, (turn, end) in enumerate(forks)))
        await asyncio.sleep(1000)
        assert runner.load == 0
        # Whoever lost a place would leave less than all of them here.
        await asyncio.gather(*(said(runner, step_of(f"after{n}", 1, first_turn=1)) for n in range(most)))
        assert runner.load == most
        await runner.close()

    virtual_time.run(story())
    assert sorted(environment.closed) == list(range(1, environment.opened + 1))
