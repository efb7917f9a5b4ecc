"""A generator replica that fails for a while and then works again, beside one that always works.

The scheduler, the loop around it and the replicas are real. In virtual time.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from deployments.failures import GenerationLost
from deployments.protocols.generation import Generation, GenerationRequest, SamplingOptions
from service.remote.generator import TRY_SUSPECTS_S, RemoteGenerator
from tests import virtual_time
from tests.fakes.in_process_handle import InProcessHandle, ReadyReplica, TimedEngine

SEQUENCES = 4
GENERATION_S = 2.5
BREAKS_AT, WORKS_AT = 11.0, 51.0
ENDS_AT = 100.0


class BreakingEngine(TimedEngine):
    """Fails every generation at once while it is broken, after it has made the others for `GENERATION_S`."""

    description = replace(TimedEngine.description, max_num_seqs=SEQUENCES)

    def __init__(self) -> None:
        self.is_broken = False
        self.asked_at: list[float] = []
        self.ongoing = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked_at.append(virtual_time.now())
        if self.is_broken:
            raise GenerationLost("The engine is broken.")
        self.ongoing += 1
        try:
            await asyncio.sleep(GENERATION_S)
        finally:
            self.ongoing -= 1
        return Generation([1], [0.0], "stop")


class Fleet:
    """Two replicas, and rollouts that want to generate all the time."""

    def __init__(self, window_factor: float | None) -> None:
        self.engines = {"a": BreakingEngine(), "b": BreakingEngine()}
        handle = InProcessHandle({name: ReadyReplica(engine) for name, engine in self.engines.items()})
        self.generator = RemoteGenerator(handle.unchecked, window_factor)
        self.losses: Counter[str] = Counter()
        """By rollout."""

    async def play(self, rollouts: int, turns: int) -> None:
        """Plays rollouts until `ENDS_AT`, so many at a time. Lost generations are made again, as the core does."""
        await self.generator.describe()
        await asyncio.gather(*(self._play_one_after_another(f"{place}", turns) for place in range(rollouts)))

    async def _play_one_after_another(self, place: str, turns: int) -> None:
        number = 0
        while virtual_time.now() < ENDS_AT:
            await self._rollout(f"{place}.{number}", turns)
            number += 1

    async def _rollout(self, name: str, turns: int) -> None:
        turn = 0
        while turn < turns and virtual_time.now() < ENDS_AT:
            request = GenerationRequest(
                f"{name}-{turn}", [1], 1, (), SamplingOptions(), rollout_id=name, group=name, turn=turn
            )
            try:
                await self.generator.generate(request)
                turn += 1
            except GenerationLost:
                self.losses[name] += 1
        self.generator.release(name)

    def starts_after(self, time: float) -> float:
        """Generations of replica `a` from then on, as a multiple of those of `b`."""
        a, b = (sum(at >= time for at in engine.asked_at) for engine in self.engines.values())
        return a / b


async def played_with_a_broken_replica(rollouts: int, turns: int, window_factor: float | None) -> Fleet:
    fleet = Fleet(window_factor)
    playing = asyncio.create_task(fleet.play(rollouts, turns))
    for is_broken, until in ((True, BREAKS_AT), (False, WORKS_AT)):
        await asyncio.sleep(until - virtual_time.now())
        fleet.engines["a"].is_broken = is_broken
    await playing
    return fleet


@pytest.mark.parametrize("turns", [1, 1000])
@pytest.mark.parametrize("window_factor", [1.0, 2.0])
def test_a_waiting_generation_tries_a_failing_replica_every_five_seconds(turns: int, window_factor: float) -> None:
    fleet = virtual_time.run(played_with_a_broken_replica(40, turns, window_factor))
    asked_at = fleet.engines["a"].asked_at
    # Its last generations of before failed at 12.5.
    assert [round(at, 1) for at in asked_at if 13 < at < 54] == [17.5, 22.5, 27.5, 32.5, 37.5, 42.5, 47.5, 52.5]
    assert max(fleet.losses.values()) == 1, "another one tries next"
    assert fleet.starts_after(WORKS_AT + 10) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("window_factor", [None, 1.0, 2.0])
@pytest.mark.parametrize("rollouts", [2, 8])
def test_where_none_waits_the_next_one_tries_a_failing_replica(rollouts: int, window_factor: float | None) -> None:
    fleet = virtual_time.run(played_with_a_broken_replica(rollouts, 1, window_factor))
    between = [later - at for at, later in pairwise([at for at in fleet.engines["a"].asked_at if 18 < at < WORKS_AT])]
    assert len(between) == 5
    assert all(TRY_SUSPECTS_S - GENERATION_S < each < TRY_SUSPECTS_S + GENERATION_S for each in between)
    assert fleet.starts_after(WORKS_AT + 10) == pytest.approx(1, rel=0.1)
