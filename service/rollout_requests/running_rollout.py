"""One request while it is played: its rollouts as they end, encoded for its caller, and the summary of them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Container, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from rollout_client.contract.base import FieldProblem
from rollout_client.contract.rollouts import RolloutRequest, RolloutSummary, SampleInput, SampleResult
from rollout_client.contract.selection import NextSampleRange, SampleRange
from service.problems import SAMPLE_FAILED, RequestProblem
from service.rollout_requests.garbage_collection import free_items
from service.rollout_requests.result_encoding import encode_beside_others, sample_line, size_of
from service.rollout_requests.sample_ranges import following, moved_past
from service.rollouts.episode import Episode
from service.rollouts.group_selection import EarlyStopping
from service.rollouts.loop import RolloutContext, play_request
from service.rollouts.metrics import RequestMetricsAccumulator
from service.rollouts.selected_groups import GroupsToSelect, play_selected_groups

MOST_SAMPLES_FREED_INLINE = 512
MOST_ROLLOUTS_INLINE = 512
"""Computing the metrics of so many takes some milliseconds."""
EndedRollout = tuple[int, SampleResult]
Encoded = TypeVar("Encoded")


class RunningRollout:
    """One request that is played while it is iterated. Yields (position in the response, result) as samples end.

    Guarantees: every sample is yielded exactly once; nothing is started before the first iteration, so one that is
    never iterated needs no closing; after `aclose`, no call of the request is under way.
    """

    size = 0
    """The sizes of the rollouts that were encoded so far, as `size_of` has them."""

    def __init__(
        self,
        request: RolloutRequest,
        request_id: str,
        first: Sequence[Episode],
        selected: GroupsToSelect | None,
        context: RolloutContext,
        current_version: Callable[[], int | None],
        note_end: Callable[[Episode, SampleResult, float], None],
        echoed_bytes: int = 0,
        certificates: Mapping[str, str] | None = None,
    ) -> None:
        """Plays nothing yet.

        Args:
            request: of one that selects groups, its samples are freed at the end.
            first: the episodes that are played first: all of them, unless groups are selected.
            selected: set for a request with `keep.where`.
            note_end: called once for each rollout, when it is delivered, with how many seconds ago it ended.
            echoed_bytes: about the size of what each rollout repeats of its sample.
            certificates: the hashes of those of the tasks.
        """
        self.request_id = request_id
        self._request = request
        self._first: Sequence[Episode] = first
        self._groups = selected
        self._kept: list[int] = []
        """The places of the groups that were selected so far."""
        self._context = context
        self._current_version = current_version
        self._report_end = note_end
        self.echoed_bytes = echoed_bytes
        self._certificates = certificates
        self._counted = 0
        """Rollouts in the summary so far: those of groups that were dropped are in it."""
        self._metrics = RequestMetricsAccumulator(request.policy.name)
        self._results = self._play()

    def __aiter__(self) -> AsyncGenerator[EndedRollout, None]:
        """Raises `RequestProblem` after it has yielded a failed sample of a request that has `on_error: fail`."""
        return self._results

    async def aclose(self) -> None:
        """Cancels the samples that still run."""
        await self._results.aclose()

    async def encoded(
        self, encode: Callable[[int, SampleResult], Encoded], skipped: Container[int] = ()
    ) -> AsyncGenerator[tuple[int, Encoded], None]:
        """Yields each rollout, encoded, with its position; those at the `skipped` positions count in the summary alone.

        Raises:
            RequestProblem: a sample failed, and the request has `on_error: fail`.
        """
        async with aclosing(self) as ended:
            async for position, result in ended:
                if position not in skipped:
                    size = size_of(result, self.echoed_bytes)
                    self.size += size
                    work = partial(encode, position, result)
                    yield position, await encode_beside_others(size, work, self._context.observer)

    def lines(self, skipped: Container[int] = ()) -> AsyncGenerator[tuple[int, bytes], None]:
        """`encoded` as the lines of a stream."""
        return self.encoded(sample_line, skipped)

    @property
    def summary(self) -> RolloutSummary:
        """The metrics and weight versions of the samples that have been yielded so far."""
        return RolloutSummary(
            request_id=self.request_id,
            metrics=self._metrics.metrics(),
            policy=self._metrics.policy(self._current_version()),
            **self._optional_fields(),
        )

    async def final_summary(self) -> RolloutSummary:
        """The `summary` after the last rollout; that of many is computed, and its parts freed, in a thread."""
        if self._counted <= MOST_ROLLOUTS_INLINE:
            return self.summary

        def computed() -> RolloutSummary:
            summary = self.summary
            self._metrics.free_samples()
            return summary

        return await asyncio.to_thread(computed)

    def _optional_fields(self) -> dict[str, Any]:
        drawn, groups, fields = self._request.samples_from, self._groups, dict[str, Any]()
        moved: Iterable[SampleRange] = map(following, drawn)
        if groups is not None:
            fields["groups"] = groups.selection.counts
            if drawn:
                moved = moved_past(drawn, groups.selection.decided)
        if drawn:
            fields["next_samples_from"] = _next_ranges(moved)
        return fields | ({"certificates": self._certificates} if self._certificates else {})

    def place_of(self, group: int) -> int:
        """The place of a group of the answer among the samples that were drawn."""
        return group if self._groups is None else self._kept[group]

    @property
    def selected(self) -> tuple[int, int] | None:
        """How many samples were drawn and judged, and how many groups kept; `None` if no groups are selected."""
        if self._groups is None:
            return None
        counts = self._groups.selection.counts
        return counts.drawn, counts.kept

    async def _play(self) -> AsyncGenerator[EndedRollout, None]:
        # Only the loop refers to the episodes: each is freed when it has ended, not thousands at once at the end.
        first, self._first = self._first, ()
        if self._groups is not None:
            async with aclosing(self._play_selected(first, self._groups)) as selected:
                async for ended_rollout in selected:
                    yield ended_rollout
            await free_beside_others(self._request.samples)
            return
        early_stopping = EarlyStopping(self._request.keep, {episode: episode.identity.group for episode in first})
        playing = play_request(first, self._context, early_stopping, self._request.deadline_s)
        del first, early_stopping
        async with aclosing(playing) as ended:
            async for episode in ended:
                result = episode.result()
                self._note_end(episode, result)
                self._count(episode, result)
                yield episode.identity.position, result
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
                    for position, (_, result) in enumerate(group.rollouts, begin):
                        yield position, result

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
        self._counted += 1
        self._metrics.add(result, episode.versions.at_end, episode.metrics.tokens_by_replica)

    def _raise_failure(self, episode: Episode) -> None:
        if episode.error is not None and self._request.on_error == "fail":
            message = f"generation {episode.identity.generation_index} failed: {episode.error.message}"
            field = f"samples[{episode.identity.group}]"
            raise RequestProblem(SAMPLE_FAILED, [FieldProblem(field=field, message=message, value=episode.error.kind)])


async def free_beside_others(samples: list[SampleInput]) -> None:
    """Empties the list, a long one in a thread."""
    if len(samples) > MOST_SAMPLES_FREED_INLINE:
        await asyncio.to_thread(free_items, samples)


def _next_ranges(moved: Iterable[SampleRange]) -> list[NextSampleRange]:
    """The ranges with the fields that were given; an empty `without` is left out."""
    given = (drawn.model_dump(exclude_unset=True, exclude=set() if drawn.without else {"without"}) for drawn in moved)
    return [NextSampleRange(**fields) for fields in given]
