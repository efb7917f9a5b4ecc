"""Plays the groups of a request with `keep.where`: what `GroupSelection` decides, with the I/O.

Guarantees beside those of the selection: groups are drawn, judged and cancelled however slowly the caller iterates;
after the end nothing is in flight.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollout_client.contract.rollouts import Keep, SampleResult
from service.rollouts.episode import Episode
from service.rollouts.group_selection import EarlyStopping, GroupSelection
from service.rollouts.loop import RolloutContext, RunningEpisodes

DrawGroups = Callable[[range], Awaitable[Sequence[Episode]]]
"""Makes the episodes of the groups at these places."""


_EndedEpisode = tuple[Episode, SampleResult]


class _JudgedGroup(NamedTuple):
    """A group that is decided, with all before it."""

    place: int
    is_kept: bool
    rollouts: list[_EndedEpisode]


@dataclass(frozen=True, slots=True)
class GroupsToSelect:
    """The groups of a request with `keep.where`, and how they are judged."""

    keep: Keep
    fault_of: Callable[[Sequence[SampleResult]], str | None]
    """Why a group whose rollouts have all ended is dropped; `None` if it passes."""
    selection: GroupSelection
    draw: DrawGroups


async def play_selected_groups(
    first: Sequence[Episode],
    groups: GroupsToSelect,
    context: RolloutContext,
    note_end: Callable[[Episode, SampleResult], None],
    deadline_s: float | None = None,
) -> AsyncGenerator[_JudgedGroup, None]:
    """Plays the groups of `first` and those that are drawn, and yields each when it is decided, in order.

    Nothing is started before the first iteration. Closing the generator cancels what runs.

    Args:
        note_end: called with each episode that has ended. What it raises ends the request.
        deadline_s: seconds after which the rollouts that run end as `deadline`, and nothing is drawn any more.
    """
    judged: asyncio.Queue[_JudgedGroup | None] = asyncio.Queue()
    selecting = _SelectingGroups(first, groups, context, note_end, judged)
    if deadline_s is not None:
        selecting.running.cut_off_after(deadline_s)
    playing = asyncio.create_task(selecting.play())
    playing.add_done_callback(lambda _: judged.put_nowait(None))
    try:
        while (group := await judged.get()) is not None:
            yield group
        await playing
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await selecting.running.stop()


class _SelectingGroups:
    """The groups that are in flight, and those that have ended and are not decided."""

    def __init__(
        self,
        first: Sequence[Episode],
        groups: GroupsToSelect,
        context: RolloutContext,
        note_end: Callable[[Episode, SampleResult], None],
        judged: "asyncio.Queue[_JudgedGroup | None]",
    ) -> None:
        self._groups = groups
        self._note_end = note_end
        self._judged = judged
        self._early_stopping: EarlyStopping[Episode] = EarlyStopping(groups.keep, _groups_of(first))
        self.running = RunningEpisodes(first, context, self._early_stopping)
        self._in_flight: dict[int, set[Episode]] = defaultdict(set)
        """Those of each group that have not ended, by its place."""
        self._ended: dict[int, list[_EndedEpisode]] = defaultdict(list)
        """Those that have, until their group is decided."""
        self._drawing: set[asyncio.Task[Sequence[Episode]]] = set()
        self._note_begin(first)

    async def play(self) -> None:
        """Returns when the last group that is needed is decided."""
        selection = self._groups.selection
        ending: asyncio.Task[Episode] | None = None
        try:
            while not selection.is_done:
                if places := selection.draw():
                    self._drawing.add(asyncio.ensure_future(self._groups.draw(places)))
                ending = ending or asyncio.create_task(self.running.ended.get())
                await asyncio.wait([ending, *self._drawing], return_when=asyncio.FIRST_COMPLETED)
                for drawn in [drawing for drawing in self._drawing if drawing.done()]:
                    self._drawing.discard(drawn)
                    self._begin(drawn.result())
                if ending.done():
                    self._end(ending.result())
                    ending = None
                    while not self.running.ended.empty():
                        self._end(self.running.ended.get_nowait())
        finally:
            left = [task for task in (ending, *self._drawing) if task is not None]
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)

    def _begin(self, drawn: Sequence[Episode]) -> None:
        unneeded = self._groups.selection.unneeded()
        episodes = [episode for episode in drawn if episode.identity.group not in unneeded]
        self._early_stopping.add(_groups_of(episodes))
        self._note_begin(episodes)
        self.running.add(episodes)

    def _note_begin(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            self._in_flight[episode.identity.group].add(episode)

    def _end(self, episode: Episode) -> None:
        place, result = episode.identity.group, episode.result()
        self._note_end(episode, result)
        self._ended[place].append((episode, result))
        self._in_flight[place].discard(episode)
        if self._in_flight[place]:
            return
        del self._in_flight[place]
        selection = self._groups.selection
        if self.running.is_over:
            selection.stop_drawing()
        fault = self._groups.fault_of([ended for _, ended in self._ended[place]])
        for decided, is_kept in selection.end(place, fault):
            rollouts = sorted(self._ended.pop(decided), key=lambda ended: ended[0].identity.position)
            self._judged.put_nowait(_JudgedGroup(decided, is_kept, rollouts))
        for unneeded in selection.unneeded():
            self.running.cut_off(self._in_flight.get(unneeded, ()), "cancelled")


def _groups_of(episodes: Sequence[Episode]) -> dict[Episode, int]:
    return {episode: episode.identity.group for episode in episodes}
