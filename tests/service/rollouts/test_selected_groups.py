"""Groups that are selected while they play: what begins when, and how it ends."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial

import pytest

from deployments.failures import GenerationRejected
from deployments.protocols.environments import StepRequest
from rollout_client.contract.rollouts import Keep, SampleResult
from rollout_env import StepOutcome
from service.rollouts.episode import Episode
from service.rollouts.group_selection import GroupSelection, fault_of
from service.rollouts.selected_groups import GroupsToSelect, _JudgedGroup, play_selected_groups
from tests import virtual_time
from tests.service.rollouts.playing import async_context
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, ScriptedGenerator

KEEP = Keep.model_validate({"groups": 2, "where": {"reward_mean": {"gt": 0}}})
assert KEEP.where is not None
fault_of_one = partial(fault_of, where=KEEP.where, full=1)


class Timed(ScriptedEnvironment):
    """Ends the rollouts of the sample at each place after so many seconds, with so much reward."""

    def __init__(self, seconds_and_rewards: Sequence[tuple[int, float]]) -> None:
        super().__init__([])
        self._plan = seconds_and_rewards

    async def step(self, request: StepRequest) -> StepOutcome:
        self.requests.append(request)
        seconds, reward = self._plan[request.sample or 0]
        await asyncio.sleep(seconds)
        return StepOutcome([], reward, terminated=True)


class Drawing:
    """A request for groups of one rollout. Notes when each group is drawn, which takes `draw_s` seconds."""

    def __init__(self, plan: Sequence[tuple[int, float]], draw_s: float = 0, keep: Keep = KEEP) -> None:
        self.environment = Timed(plan)
        self.drawn: dict[int, float] = {}
        self._draw_s = draw_s
        self.selection = GroupSelection(keep.groups or 1, len(plan), 2 * (keep.groups or 1))
        self.groups = GroupsToSelect(keep, fault_of_one, self.selection, self.draw)
        self.ended: list[int] = []
        self.context = async_context(ScriptedGenerator(["A"]), self.environment)

    async def draw(self, places: range) -> list[Episode]:
        now = virtual_time.now()
        self.drawn |= dict.fromkeys(places, now)
        await asyncio.sleep(self._draw_s)
        return [EpisodeRecipe(position=place, group=place).make() for place in places]

    def note_end(self, episode: Episode, result: SampleResult) -> None:
        self.ended.append(episode.identity.group)

    async def play(
        self, deadline_s: float | None = None, pause_s: float = 0, at_least: int = 0
    ) -> list[tuple[int, bool]]:
        first = await self.draw(self.selection.draw(at_least))
        judged: list[_JudgedGroup] = []
        playing = play_selected_groups(first, self.groups, self.context, self.note_end, deadline_s)
        async with aclosing(playing) as groups:
            async for group in groups:
                judged.append(group)
                await asyncio.sleep(pause_s)
        return [(group.place, group.is_kept) for group in judged]


async def test_a_group_that_ends_early_waits_for_those_before_it() -> None:
    drawing = Drawing([(9, 1.0), (1, 0.0), (2, 1.0), (1, 1.0)])
    assert await drawing.play() == [(0, True), (1, False), (2, True)]
    assert drawing.ended == [1, 3, 2, 0]
    assert virtual_time.now() == 9


async def test_further_groups_are_drawn_at_the_verdict_that_needs_them() -> None:
    drawing = Drawing([(1, 0.0), (9, 1.0), (1, 0.0), (1, 0.0), (1, 1.0)])
    assert await drawing.play(pause_s=100) == [(0, False), (1, True), (2, False), (3, False), (4, True)]
    assert drawing.drawn == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}


async def test_what_is_not_needed_is_cancelled_before_the_last_has_ended() -> None:
    drawing = Drawing([(9, 1.0), (1, 1.0), (2, 1.0), (60, 1.0)])
    assert await drawing.play(at_least=4) == [(0, True), (1, True)]
    assert drawing.ended == [1, 2, 3, 0]
    assert virtual_time.now() == 9


async def test_a_group_that_is_drawn_too_late_is_never_played() -> None:
    drawing = Drawing([(20, 1.0), *[(1, 0.0)] * 3, *[(5, 1.0)] * 2, (1, 1.0)], draw_s=10)
    assert [place for place, is_kept in await drawing.play(at_least=6) if is_kept] == [0, 4]
    # The seventh is drawn at the failures of three, and there when two others have passed.
    assert drawing.drawn[6] == 11
    assert {request.sample for request in drawing.environment.requests} == set(range(6))


async def test_at_the_deadline_what_is_being_drawn_is_not_played() -> None:
    drawing = Drawing([(1, 0.0), (60, 1.0), (1, 1.0), (1, 1.0)], draw_s=10)
    assert await drawing.play(deadline_s=4) == [(0, False), (1, False), (2, False), (3, False)]
    assert drawing.selection.counts.dropped == {"reward_mean.gt": 1, "not_full": 3}
    assert {request.sample for request in drawing.environment.requests} == {0, 1}


async def test_what_noting_an_end_raises_ends_the_request_and_cancels_what_runs() -> None:
    class Refusing(Drawing):
        def note_end(self, episode: Episode, result: SampleResult) -> None:
            raise GenerationRejected("no")

    with pytest.raises(GenerationRejected):
        await Refusing([(60, 1.0), (1, 1.0)]).play()
    assert (virtual_time.now(), asyncio.all_tasks()) == (1, {asyncio.current_task()})


async def test_a_failure_of_drawing_ends_the_request() -> None:
    class Failing(Drawing):
        async def draw(self, places: range) -> list[Episode]:
            if self.drawn:
                raise GenerationRejected("no")
            return await super().draw(places)

    with pytest.raises(GenerationRejected):
        await Failing([(1, 0.0), (60, 1.0), (1, 1.0), (1, 1.0)]).play()
    assert asyncio.all_tasks() == {asyncio.current_task()}
