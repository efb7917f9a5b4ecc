"""Which generations of an engine run, and which of them stall: times are passed in, no engine runs."""

import asyncio
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.failures import ReplicaShuttingDown
from deployments.generation.running_generations import RunningGeneration, RunningGenerations
from deployments.protocols.generation import GenerationRequest, SamplingOptions


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, [1], 1, (), SamplingOptions())


def test_generations_are_interrupted_by_their_ids_while_they_run() -> None:
    aborted: list[list[str]] = []

    async def abort(engine_ids: list[str]) -> None:
        aborted.append(engine_ids)

    nothing: Any = None
    llm: Any = SimpleNamespace(abort=abort)
    generations = RunningGenerations(llm, nothing, nothing, nothing)

    async def interrupt() -> None:
        failure = ReplicaShuttingDown("it ends")
        with generations.running(request("a")) as first, generations.running(request("b")) as other:
            with generations.running(request("a")) as retry:
                assert len({first.engine_id, retry.engine_id, other.engine_id}) == len(generations) == 3
                await generations.interrupt(["a", "unknown"], failure)
            assert [one.interrupted.is_set() for one in (first, retry, other)] == [True, True, False]
            assert (first.failure, other.failure) == (failure, None)
            await generations.interrupt(["a", "b"])
        await generations.interrupt(["a", "b"])
        assert aborted == [[first.engine_id, retry.engine_id], [first.engine_id, other.engine_id]]

    asyncio.run(interrupt())
    assert list(generations) == []


@dataclass
class Observed:
    """Observes an engine once a second; `a` has a timeout of five seconds, `b` has none."""

    a: RunningGeneration = field(
        default_factory=lambda: RunningGeneration(replace(request("a"), token_timeout_s=5.0), "a.0")
    )
    b: RunningGeneration = field(default_factory=lambda: RunningGeneration(request("b"), "b.0"))
    now: float = 100.0

    def second(
        self, a: int | None = None, b: int | None = None, moves: bool = False, paused: bool = False
    ) -> list[str]:
        """The stalled generations a second later; `a` and `b` are their tokens so far."""
        self.now += 1
        given = ((self.a, a), (self.b, b))
        return [
            one.request.generation_id
            for one, generated in given
            if generated is not None and one.has_stalled(self.now, generated, moves, paused)
        ]


def test_a_generation_without_a_new_token_for_its_timeout_stalls_although_the_engine_goes_on() -> None:
    engine = Observed()
    assert [engine.second(a=3, b=tokens, moves=True) for tokens in range(7)] == [[]] * 5 + [["a"]] * 2


def test_a_long_generation_with_tokens_now_and_then_does_not_stall() -> None:
    engine = Observed()
    assert [engine.second(a=second // 5, moves=True) for second in range(5, 100)] == [[]] * 95


def test_a_generation_without_a_token_waits_as_long_as_the_engine_goes_on() -> None:
    engine = Observed()
    assert [engine.second(a=0, moves=True) for _ in range(100)] == [[]] * 100
    assert [engine.second(a=0) for _ in range(6)] == [[]] * 4 + [["a"]] * 2


def test_a_generation_without_a_timeout_never_stalls() -> None:
    engine = Observed()
    assert [engine.second(b=1) for _ in range(100)] == [[]] * 100


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_pause_does_not_count_and_neither_does_the_time_before_it(tokens: int) -> None:
    engine = Observed()
    for _ in range(4):
        assert engine.second(a=tokens) == []
    for _ in range(50):
        assert engine.second(a=tokens, paused=True) == []
    assert [engine.second(a=tokens) for _ in range(5)] == [[]] * 4 + [["a"]]
