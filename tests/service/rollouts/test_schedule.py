"""When the samples of a request may begin their next phase."""

import asyncio
from collections import Counter

import pytest

from service.rollouts.pacing import EPISODES_PER_ITERATION, LockstepSchedule
from tests import virtual_time


class Waiting:
    """Samples that wait for their next phase; `begun` names those that have begun it."""

    def __init__(self, samples: int) -> None:
        self.schedule = LockstepSchedule()
        self.begun: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        for _ in range(samples):
            self.schedule.add_sample()

    async def wait(self, *names: str) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self._wait(name))
        await virtual_time.settled()

    async def _wait(self, name: str) -> None:
        await self.schedule.wait_for_phase()
        self.begun.append(name)

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await virtual_time.settled()


async def test_in_lockstep_many_samples_begin_a_phase_in_consecutive_iterations() -> None:
    schedule, begun = LockstepSchedule(), Counter[int]()

    async def play() -> None:
        await schedule.wait_for_phase()
        begun[virtual_time.iteration()] += 1

    samples = range(2 * EPISODES_PER_ITERATION + 1)
    for _ in samples:
        schedule.add_sample()
    await asyncio.gather(*(play() for _ in samples))
    assert list(begun.values()) == [EPISODES_PER_ITERATION, EPISODES_PER_ITERATION, 1]
    assert max(begun) - min(begun) == 2


async def test_in_lockstep_a_cancelled_sample_does_not_count() -> None:
    waiting = Waiting(3)
    await waiting.wait("a", "b")
    await waiting.cancel("b")
    waiting.schedule.remove_sample()
    await virtual_time.settled()
    assert sorted(waiting.begun) == [], "two samples are left, and one of them waits"
    await waiting.wait("c")
    assert sorted(waiting.begun) == ["a", "c"]


async def test_in_lockstep_a_sample_may_be_cancelled_as_its_phase_begins() -> None:
    waiting = Waiting(2)
    await waiting.wait("a")
    waiting.schedule.remove_sample()
    waiting.tasks["a"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting.tasks["a"]
    assert waiting.begun == []
