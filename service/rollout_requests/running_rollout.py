"""One request while it is played: its rollouts as they end, and the summary of them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rollout_client.contract.rollouts import RolloutRequest, RolloutSummary, SampleError, SampleInput, SampleResult
from rollout_client.contract.sample_ranges import NextSampleRange, SampleRange, following, moved_past
from service.rollout_requests.garbage_collection import free_items
from service.rollouts.early_stopping import EarlyStopping
from service.rollouts.episode import Episode
from service.rollouts.episode_records import Echo
from service.rollouts.loop import RolloutContext, play_request
from service.rollouts.metrics import RequestMetricsAccumulator
from service.rollouts.selected_groups import GroupsToSelect, play_selected_groups

MOST_SAMPLES_FREED_INLINE = 512
EndedRollout = tuple[int, SampleResult, Echo | None]


class SampleFailed(Exception):
    """A sample failed in a request that has `on_error: fail`. `sample_position` is its place in the request."""

    def __init__(self, sample_position: int, generation_index: int, error: SampleError) -> None:
        self.sample_position = sample_position
        self.kind = error.kind
        super().__init__(f"generation {generation_index} failed: {error.message}")


@dataclass(frozen=True, slots=True)
class PreparedEpisodes:
    """The episodes that are played first: all of them, unless groups are selected."""

    episodes: Sequence[Episode]
    groups: GroupsToSelect | None = None
    """Set for a request with `keep.where`."""
    samples: list[SampleInput] = field(default_factory=list)
    """Those from which groups are drawn. Thousands are freed in a thread at the end."""


class RunningRollout:
    """One request that is played while it is iterated. Yields (position in the response, result, echo) as samples end.

    Guarantees: every sample is yielded exactly once; nothing is started before the first iteration, so one that is
    never iterated needs no closing; after `aclose`, no call of the request is under way.
    """

    counted = 0
    """Rollouts in the summary so far: those of groups that were dropped are in it."""

    def __init__(
        self,
        request: RolloutRequest,
        request_id: str,
        prepared: PreparedEpisodes,
        context: RolloutContext,
        current_version: Callable[[], int | None],
        note_end: Callable[[Episode, SampleResult, float], None],
    ) -> None:
        """Plays nothing yet.

        Args:
            note_end: called once for each rollout, when it is delivered, with how many seconds ago it ended.
        """
        self.request_id = request_id
        self._request = request
        self._prepared: PreparedEpisodes | None = prepared
        self._selection = None if prepared.groups is None else prepared.groups.selection
        self._kept: list[int] = []
        """The places of the groups that were selected so far."""
        self._context = context
        self._current_version = current_version
        self._report_end = note_end
        self.observer = context.observer
        self._metrics = RequestMetricsAccumulator(request.policy.name)
        self._results = self._play()

    def __aiter__(self) -> AsyncGenerator[EndedRollout, None]:
        """Raises `SampleFailed` after it has yielded a failed sample of a request that has `on_error: fail`."""
        return self._results

    async def aclose(self) -> None:
        """Cancels the samples that still run."""
        await self._results.aclose()

    @property
    def summary(self) -> RolloutSummary:
        """The metrics and weight versions of the samples that have been yielded so far."""
        return RolloutSummary(
            request_id=self.request_id,
            metrics=self._metrics.metrics(),
            policy=self._metrics.policy(self._current_version()),
            **self._optional_fields(),
        )

    def _optional_fields(self) -> dict[str, Any]:
        drawn, selection, fields = self._request.samples_from, self._selection, dict[str, Any]()
        moved: Iterable[SampleRange] = map(following, drawn)
        if selection is not None:
            fields["groups"] = selection.counts
            if drawn:
                moved = moved_past(drawn, selection.decided)
        if drawn:
            fields["next_samples_from"] = next_ranges(moved)
        return fields

    def place_of(self, group: int) -> int:
        """The place of a group of the answer among the samples that were drawn."""
        return group if self._selection is None else self._kept[group]

    @property
    def selected(self) -> tuple[int, int] | None:
        """How many samples were drawn and judged, and how many groups kept; `None` if no groups are selected."""
        if self._selection is None:
            return None
        return self._selection.counts.drawn, self._selection.counts.kept

    def final_summary(self) -> RolloutSummary:
        """The `summary` after the last sample, in a thread; frees what it was computed from there."""
        summary = self.summary
        self._metrics.free_samples()
        return summary

    async def _play(self) -> AsyncGenerator[EndedRollout, None]:
        # Only the loop refers to the episodes: each is freed when it has ended, not thousands at once at the end.
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        if prepared.groups is not None:
            async with aclosing(self._play_selected(prepared.episodes, prepared.groups)) as selected:
                async for ended_rollout in selected:
                    yield ended_rollout
            await free_beside_others(prepared.samples)
            return
        groups = {episode: episode.identity.group for episode in prepared.episodes}
        early_stopping = EarlyStopping(self._request.keep, groups)
        playing = play_request(prepared.episodes, self._context, early_stopping, self._request.deadline_s)
        del prepared, groups, early_stopping
        async with aclosing(playing) as ended:
            async for episode in ended:
                result = episode.result()
                self._note_end(episode, result)
                self._count(episode, result)
                yield episode.identity.position, result, episode.start.echo
                self._raise_failure(episode)

    async def _play_selected(
        self, first: Sequence[Episode], groups: GroupsToSelect
    ) -> AsyncGenerator[EndedRollout, None]:
        """The rollouts of the groups that are kept, at their positions in the answer."""
        size = self._request.num_generations
        playing = play_selected_groups(first, groups, self._context, self._note_selected, self._request.deadline_s)
        async with aclosing(playing) as judged:
            async for group in judged:
                for episode, result in group.rollouts:
                    self._count(episode, result)
                if group.is_kept:
                    begin = size * len(self._kept)
                    self._kept.append(group.place)
                    for position, (episode, result) in enumerate(group.rollouts, begin):
                        yield position, result, episode.start.echo

    def _note_end(self, episode: Episode, result: SampleResult) -> None:
        """Everything that counts or keeps the end of a rollout is told of it from here, by its delivery."""
        progress = self._context.progress
        if progress is None:
            self._report_end(episode, result, 0.0)
            return
        if progress.was_delivered(episode):
            return
        time_s = asyncio.get_running_loop().time
        ended_at = time_s()
        progress.ended(episode, lambda: self._report_end(episode, result, time_s() - ended_at))

    def _note_selected(self, episode: Episode, result: SampleResult) -> None:
        self._note_end(episode, result)
        self._raise_failure(episode)

    def _count(self, episode: Episode, result: SampleResult) -> None:
        self.counted += 1
        self._metrics.add(result, episode.versions.at_end, episode.metrics.tokens_by_replica)

    def _raise_failure(self, episode: Episode) -> None:
        if episode.error is not None and self._request.on_error == "fail":
            raise SampleFailed(episode.identity.group, episode.identity.generation_index, episode.error)


async def free_beside_others(samples: list[SampleInput]) -> None:
    """Empties the list, a long one in a thread."""
    if len(samples) > MOST_SAMPLES_FREED_INLINE:
        await asyncio.to_thread(free_items, samples)


def next_ranges(moved: Iterable[SampleRange]) -> list[NextSampleRange]:
    """The ranges with the fields that were given; an empty `without` is left out."""
    given = (drawn.model_dump(exclude_unset=True, exclude=set() if drawn.without else {"without"}) for drawn in moved)
    return [NextSampleRange(**fields) for fields in given]
