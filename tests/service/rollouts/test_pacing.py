"""Many episodes go on over several iterations of the event loop, a bounded number in each, in order."""

import asyncio
from collections import Counter
from contextlib import aclosing

import pytest

from deployments.protocols.generation import Generation, GenerationRequest
from service.rollouts.group_selection import EarlyStopping
from service.rollouts.loop import RolloutContext, play_request
from service.rollouts.pacing import (
    EPISODES_PER_ITERATION,
    TOKENS_PER_EPISODE,
    LoopPacer,
    PacedWork,
    Schedule,
)
from tests import virtual_time
from tests.service.rollouts.playing import KEEP_ALL
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, ScriptedGenerator


async def go_on(pacer: LoopPacer, count: int, new_tokens: int = 0) -> tuple[list[int], list[int]]:
    """Lets so many episodes go on at once. Returns their order, and how many went on in each iteration."""
    order, by_iteration = list[int](), Counter[int]()

    async def one(number: int) -> None:
        await pacer.wait_for_turn(number, new_tokens)
        order.append(number)
        by_iteration[virtual_time.iteration()] += 1

    await asyncio.gather(*map(one, range(count)))
    return order, list(by_iteration.values())


def test_a_pacer_lets_a_bounded_number_go_on_in_each_iteration() -> None:
    order, by_iteration = virtual_time.run(go_on(LoopPacer(per_iteration=3), 10))
    assert (order, max(by_iteration)) == (list(range(10)), 3)


@virtual_time.test
async def test_a_pacer_delays_nobody_below_its_bound() -> None:
    pacer = LoopPacer(per_iteration=2)
    for _ in range(3):
        for _ in range(2):
            with pytest.raises(StopIteration):
                pacer.wait_for_turn("any").send(None)
        await asyncio.sleep(0)


@virtual_time.test
async def test_those_that_come_while_others_wait_go_on_after_them() -> None:
    pacer = LoopPacer(per_iteration=3)
    order, by_iteration = list[str](), Counter[int]()

    async def one(name: str) -> None:
        await pacer.wait_for_turn(name)
        order.append(name)
        by_iteration[virtual_time.iteration()] += 1

    early = [asyncio.create_task(one("early")) for _ in range(8)]
    late: list[asyncio.Task[None]] = []
    while len(order) < 8:
        await asyncio.sleep(0)
        late.append(asyncio.create_task(one("late")))
    await asyncio.gather(*early, *late)
    assert order[:8] == ["early"] * 8
    assert len(order) > 8
    assert max(by_iteration.values()) == 3


def test_the_turn_of_a_cancelled_episode_goes_to_the_next_one() -> None:
    async def iterations_of_turns(cancelled: str) -> dict[str, int]:
        pacer = LoopPacer(per_iteration=1)
        went_on: dict[str, int] = {}

        async def one(name: str) -> None:
            await pacer.wait_for_turn(name)
            went_on[name] = virtual_time.iteration()

        tasks = {name: asyncio.create_task(one(name)) for name in ("first", "second", "third")}
        await asyncio.sleep(0)
        tasks[cancelled].cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        return went_on

    without_second = virtual_time.run(iterations_of_turns("second"))
    without_third = virtual_time.run(iterations_of_turns("third"))
    assert (list(without_second), list(without_third)) == (["first", "third"], ["first", "second"])
    assert without_second["third"] == without_third["second"]


@virtual_time.test
async def test_a_pacer_without_a_queue_lets_the_next_iteration_go_on() -> None:
    pacer = LoopPacer(per_iteration=2)
    await asyncio.gather(*(pacer.wait_for_turn(number) for number in range(3)))
    await virtual_time.settled()
    await asyncio.gather(*(pacer.wait_for_turn(number) for number in range(3)))


@virtual_time.test
async def test_an_episode_waits_until_it_has_gone_on() -> None:
    pacer = LoopPacer(per_iteration=1)
    first, second = (asyncio.create_task(pacer.wait_for_turn(name)) for name in ("first", "second"))
    await asyncio.sleep(0)
    assert (pacer.is_waiting("first"), pacer.is_waiting("second")) == (False, True)
    while not second.done():
        assert pacer.is_waiting("second")
        await asyncio.sleep(0)
    assert not pacer.is_waiting("second")
    await first


def test_an_episode_with_many_new_tokens_counts_for_several() -> None:
    _, by_iteration = virtual_time.run(go_on(LoopPacer(per_iteration=3), 5, new_tokens=2 * TOKENS_PER_EPISODE))
    assert by_iteration == [1] * 5


@virtual_time.test
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
    assert done == [0, 1, 2, 3, 4, 5]
    assert list(by_iteration.values()) == [2, 2, 2]


@virtual_time.test
async def test_paced_work_that_was_finished_goes_on_with_what_is_added_later() -> None:
    done: list[int] = []
    paced = PacedWork[int](per_iteration=1)
    paced.add(done.append, [0, 1])
    await paced.finish()
    paced.add(done.append, [2, 3])
    await paced.finish()
    assert done == [0, 1, 2, 3]


class NotingGenerator(ScriptedGenerator):
    """Counts the generations that begin, and are interrupted or cancelled, by iteration of the event loop."""

    def __init__(self, ignores_interrupts: bool) -> None:
        super().__init__(["A"], delay_s=3.0, ignores_interrupts=ignores_interrupts)
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
@virtual_time.test
async def test_no_iteration_does_more_than_its_share_of_a_large_request(
    ignores_interrupts: bool,
) -> None:
    generator = NotingGenerator(ignores_interrupts)
    episodes = [EpisodeRecipe(position=position).make() for position in range(500)]
    context = RolloutContext(generator, {"task": ScriptedEnvironment([])}, Schedule())
    early_stopping = EarlyStopping(KEEP_ALL, dict.fromkeys(episodes, 0))
    async with aclosing(play_request(episodes, context, early_stopping, deadline_s=1.5)) as ended:
        statuses = Counter([episode.status async for episode in ended])
    assert statuses == {"deadline": 500}
    assert generator.begun.total() == generator.asked.total() == 500
    assert max(generator.begun.values()) == max(generator.asked.values()) == EPISODES_PER_ITERATION
    assert generator.cut.total() == (500 if ignores_interrupts else 0)
    assert max(generator.cut.values(), default=EPISODES_PER_ITERATION) == EPISODES_PER_ITERATION
