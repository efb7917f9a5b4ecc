"""Time limits and retries of calls, in virtual time."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count, pairwise
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from deployments.failures import (
    EnvironmentLost,
    EnvironmentShuttingDown,
    GenerationLost,
    GenerationRejected,
    ReplicaShuttingDown,
    RolloutFailure,
    TurnTimedOut,
)
from service.rollouts.episode import Episode
from service.rollouts.pacing import LoopPacer
from service.rollouts.retries import LONGEST_NOTE, MOST_NOTED, RetryBudget, _Retry, with_retries, with_timeout
from tests import virtual_time
from tests.service.rollouts.playing import error_of, play, texts
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, ScriptedGenerator, ids_of, outcome

LOST = GenerationLost("The generator replica died during the call.")
SHUT_DOWN = ReplicaShuttingDown("The generator replica is being shut down.")


class ScriptedCall:
    """Raises or returns what its script says next, and remembers when it was made."""

    def __init__(self, *script: Exception | str) -> None:
        self._script = list(script)
        self.made_at: list[float] = []

    async def __call__(self) -> str:
        self.made_at.append(virtual_time.now())
        result = self._script.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def retried(call: Callable[[], Awaitable[str]], episode: Episode) -> str:
    return virtual_time.run(with_retries(call, episode.retries))


@pytest.mark.parametrize(
    ("jitter", "expected"),
    [(min, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]), (max, [1.1, 1.2, 1.4, 1.8, 2.6, 4.2, 5.0, 5.0, 5.0])],
)
def test_the_pauses_double_up_to_five_seconds_with_a_jitter_of_a_second(
    jitter: Callable[[float, float], float], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", jitter)
    call = ScriptedCall(*[LOST] * 9, "done")
    assert retried(call, EpisodeRecipe(retries=9).make()) == "done"
    assert [later - earlier for earlier, later in pairwise(call.made_at)] == pytest.approx(expected)


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_call_is_retried_as_often_as_the_budget_says(retries: int) -> None:
    failures = [GenerationLost(f"{number}") for number in range(5)]
    call = ScriptedCall(*failures)
    with pytest.raises(GenerationLost) as raised:
        retried(call, EpisodeRecipe(retries=retries).make())
    assert raised.value is failures[retries]
    assert raised.value.__context__ is None
    assert len(call.made_at) == 1 + retries


@pytest.mark.parametrize("shut_down", [SHUT_DOWN, EnvironmentShuttingDown("The replica is being shut down.")])
def test_what_a_replica_that_is_shut_down_hands_over_goes_on_at_once(shut_down: RolloutFailure) -> None:
    call = ScriptedCall(shut_down, shut_down, shut_down, "done")
    assert retried(call, EpisodeRecipe(retries=0).make()) == "done"
    began, handed_over, second, third = call.made_at
    assert handed_over == began
    assert 0.2 <= second - handed_over <= 1.2
    assert 0.4 <= third - second <= 1.4


@pytest.mark.parametrize("error", [GenerationRejected("no"), KeyError("bug"), RolloutFailure("unknown")])
def test_what_is_not_retryable_is_raised_at_once_and_costs_no_retry(error: Exception) -> None:
    episode, call = EpisodeRecipe(retries=1).make(), ScriptedCall(error, "never reached")
    with pytest.raises(type(error)) as raised:
        retried(call, episode)
    assert raised.value is error
    assert (len(call.made_at), episode.retries.take()) == (1, True)


def test_the_budget_is_shared_by_all_calls_of_an_episode() -> None:
    gone = EnvironmentLost("The replica of environment 'task' died during the call.")
    generator = ScriptedGenerator([LOST, "A"])
    environment = ScriptedEnvironment([gone, outcome("O", 1.0, terminated=True)])
    result = play(EpisodeRecipe(retries=2), generator, environment)
    assert (result.status, texts(result), result.total_reward) == ("completed", ["Q", "A", "O"], 1.0)
    assert [list(request.prompt_token_ids) for request in generator.requests] == [ids_of("Q")] * 2
    exhausted = play(EpisodeRecipe(retries=1), ScriptedGenerator([LOST, "A"]), ScriptedEnvironment([gone]))
    assert error_of(exhausted) == {"kind": "environment", "message": str(gone), "retryable": True}


def test_a_budget_remembers_its_last_retries_with_when_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.rollouts.retries.time", SimpleNamespace(time=count(50).__next__))
    one = EpisodeRecipe(retries=1).make()
    retried(ScriptedCall(SHUT_DOWN, LOST, "done"), one)
    assert list(one.retries.noted) == [_Retry(50, "generation", str(SHUT_DOWN)), _Retry(51, "generation", str(LOST))]
    for _ in range(MOST_NOTED):
        one.retries.note(GenerationLost("x" * 1000))
    assert {retry.message for retry in one.retries.noted} == {"x" * LONGEST_NOTE}


def test_a_call_beyond_its_time_limit_is_cancelled() -> None:
    cancelled_at: list[float] = []

    async def call() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled_at.append(virtual_time.now())
            raise

    with pytest.raises(TurnTimedOut, match=r"^The generation took longer than 2.5 s\.$"):
        virtual_time.run(with_timeout(2.5, call(), "The generation"))
    assert cancelled_at == [2.5]


@pytest.mark.parametrize("seconds", [None, 2.5])
def test_a_call_within_its_time_limit_returns_its_result(seconds: float | None) -> None:
    assert virtual_time.run(with_timeout(seconds, asyncio.sleep(2, "done"), "The call")) == "done"


@pytest.mark.parametrize("seconds", [None, 2.5])
def test_a_timeout_of_the_calls_own_is_raised_as_it_is(seconds: float | None) -> None:
    call = AsyncMock(side_effect=TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        virtual_time.run(with_timeout(seconds, call(), "The call"))


async def test_the_failures_of_one_instant_are_taken_in_turn() -> None:
    taken_in: list[int] = []

    class RecordingBudget(RetryBudget):
        """Records the loop iteration in which each retry was asked for."""

        def take(self) -> bool:
            taken_in.append(virtual_time.iteration())
            return False

    async def fail() -> None:
        raise LOST

    pacer = LoopPacer(per_iteration=2)
    calls = [with_retries(fail, RecordingBudget({}, 0), pacer) for _ in range(10)]
    assert await asyncio.gather(*calls, return_exceptions=True) == [LOST] * 10
    assert len(taken_in) == 10
    assert max(Counter(taken_in).values()) <= 2
