"""Many episodes go on over several iterations of the event loop, a bounded number in each, in order."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from deployments.protocols.generation import Generation, GenerationRequest
from service.rollouts.pacing import EPISODES_PER_ITERATION, TOKENS_PER_EPISODE, LoopPacer, PacedWork
from tests import virtual_time
from tests.service.rollouts.playing import async_context, playing
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, ScriptedGenerator


class Turns:
    """Who went on with the pacer, in order, and how many in each iteration."""

    def __init__(self, pacer: LoopPacer) -> None:
        self.pacer = pacer
        self.order: list[Any] = []
        self.by_iteration = Counter[int]()

    async def take(self, name: object, new_tokens: int = 0) -> None:
        await self.pacer.wait_for_turn(name, new_tokens)
        self.order.append(name)
        self.by_iteration[virtual_time.iteration()] += 1


@pytest.mark.parametrize(("new_tokens", "at_once"), [(0, 3), (2 * TOKENS_PER_EPISODE, 1)])
async def test_a_pacer_lets_a_bounded_number_go_on_in_each_iteration(new_tokens: int, at_once: int) -> None:
    turns = Turns(LoopPacer(per_iteration=3))
    await asyncio.gather(*(turns.take(number, new_tokens) for number in range(10)))
    assert (turns.order, max(turns.by_iteration.values())) == (list(range(10)), at_once)


async def test_a_pacer_delays_nobody_below_its_bound() -> None:
    pacer = LoopPacer(per_iteration=2)
    for _ in range(3):
        for _ in range(2):
            with pytest.raises(StopIteration):
                pacer.wait_for_turn("any").send(None)
        await asyncio.sleep(0)


async def test_those_that_come_while_others_wait_go_on_after_them() -> None:
    turns = Turns(LoopPacer(per_iteration=3))
    early = [asyncio.create_task(turns.take("early")) for _ in range(8)]
    late: list[asyncio.Task[None]] = []
    while len(turns.order) < 8:
        await asyncio.sleep(0)
        late.append(asyncio.create_task(turns.take("late")))
    await asyncio.gather(*early, *late)
    assert turns.order[:8] == ["early"] * 8
    assert len(turns.order) > 8
    assert max(turns.by_iteration.values()) == 3


@pytest.mark.parametrize("cancelled", ["second", "third"])
async def test_the_turn_of_a_cancelled_episode_goes_to_the_next_one(cancelled: str) -> None:
    turns = Turns(LoopPacer(per_iteration=1))
    tasks = {name: asyncio.create_task(turns.take(name)) for name in ("first", "second", "third")}
    await asyncio.sleep(0)
    tasks[cancelled].cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert turns.order == [name for name in tasks if name != cancelled]
    first, second = turns.by_iteration
    assert second == first + 2


async def test_an_episode_waits_until_it_has_gone_on() -> None:
    pacer = LoopPacer(per_iteration=1)
    tasks = [asyncio.create_task(pacer.wait_for_turn(name)) for name in ("first", "second")]
    await asyncio.sleep(0)
    assert (pacer.is_waiting("first"), pacer.is_waiting("second")) == (False, True)
    await asyncio.gather(*tasks)
    assert not pacer.is_waiting("second")


async def test_paced_work_is_begun_at_once_and_done_in_order() -> None:
    done: list[int] = []
    by_iteration = Counter[int]()

    def do(number: int) -> None:
        done.append(number)
        by_iteration[virtual_time.iteration()] += 1

    paced = PacedWork[int](per_iteration=2)
    paced.add(do, range(5))
    assert done == [0, 1]
    paced.add(do, [5])
    assert done == [0, 1]
    await paced.finish()
    assert done == list(range(6))
    paced.add(do, [6, 7, 8])
    await paced.finish()
    assert done == list(range(9))
    assert list(by_iteration.values())[:3] == [2, 2, 2]


class NotingGenerator(ScriptedGenerator):
    """Counts the generations that begin, and are interrupted or cancelled, by iteration of the event loop."""

    def __init__(self, ignores_interrupts: bool) -> None:
        super().__init__(["A"], delay_s=60.0, ignores_interrupts=ignores_interrupts)
        self.begun, self.asked, self.cut = Counter[int](), Counter[int](), Counter[int]()

    def interrupt(self, rollout_id: str) -> bool:
        self.asked[virtual_time.iteration()] += 1
        return super().interrupt(rollout_id)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.begun[virtual_time.iteration()] += 1
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            self.cut[virtual_time.iteration()] += 1
            raise


@pytest.mark.parametrize("ignores_interrupts", [False, True])
async def test_no_iteration_does_more_than_its_share_of_a_large_request(ignores_interrupts: bool) -> None:
    generator = NotingGenerator(ignores_interrupts)
    episodes = [EpisodeRecipe(position=position).make() for position in range(500)]
    async with playing(episodes, async_context(generator, ScriptedEnvironment([])), deadline_s=1.5) as ended:
        statuses = Counter([episode.status async for episode in ended])
    assert statuses == {"deadline": 500}
    assert generator.begun.total() == generator.asked.total() == 500
    assert max(generator.begun.values()) == max(generator.asked.values()) == EPISODES_PER_ITERATION
    assert generator.cut.total() == (500 if ignores_interrupts else 0)
    assert max(generator.cut.values(), default=EPISODES_PER_ITERATION) == EPISODES_PER_ITERATION
