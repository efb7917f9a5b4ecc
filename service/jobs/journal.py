"""The journal of one job: each finished turn, and each finished group. The loop's port is `ProgressLog`.

An event is the lines of the rollouts of a group as the service's NDJSON stream has them, or the line of the summary or
problem. `JobWriter` writes what the jobs of one ingress replica have to keep, the writes of all jobs together.
"""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from operator import call
from typing import TYPE_CHECKING

from deployments.failures import StoreLost
from deployments.jobs.records import Claim, Ended, JobWrite
from deployments.rpc.batching import CallBatcher, group_commit
from deployments.storage.storage import EntryName, attempts
from rollout_client.contract.rollouts import SampleInput
from rollout_client.contract.selection import SampleRange
from service.jobs.codec import (
    PLAYED,
    RANGES,
    outline_entry,
    ranges_entry,
    read_entry,
    read_outline,
    start_entries,
    turn_entry,
)
from service.rollouts.episode import Episode
from service.rollouts.episode_records import EpisodeState
from service.rollouts.pacing import PacedWork
from service.rollouts.progress import ProgressLog

if TYPE_CHECKING:
    from deployments.jobs.store import JobStore

MOST_TOKENS_INLINE = 8192
"""Bound of the messages of a turn that are encoded on the event loop."""
logger = logging.getLogger("rollout_service.jobs")


def _log_loss(lost: object) -> None:
    logger.warning("Jobs cannot be written, trying again: %s", lost)


class JobWriter:
    """Guarantees: what `write` returns for is stored; the writes of a job are made in their order; a store that is lost
    is asked again until it is back.

    Args:
        on_lost: called with each job that this replica must not play any longer, and the epoch of the write: it may
            have the job anew. A caller that waits for a write of it waits until it is cancelled.
    """

    def __init__(self, store: "JobStore", owner: str, on_lost: Callable[[str, int], None]) -> None:
        self._store = store
        self._owner = owner
        self._on_lost = on_lost
        self._writes: CallBatcher[JobWrite, bool] = group_commit(self._write, _size_of)

    def put(self, write: JobWrite) -> "asyncio.Future[bool]":
        """The result says whether the write was made; nobody need wait for it."""
        return self._writes.add(write)

    async def write(self, write: JobWrite) -> None:
        await self.until_made(self.put(write))

    async def until_made(self, made: "asyncio.Future[bool]") -> None:
        """Returns when the write of this result was made, else never."""
        if not await asyncio.shield(made):
            await asyncio.Event().wait()

    async def _write(self, writes: Sequence[JobWrite]) -> list[bool]:
        of_jobs: defaultdict[tuple[str, int], list[JobWrite]] = defaultdict(list)
        for write in writes:
            of_jobs[write.job_id, write.epoch].append(write)
        merged = [_merged_write(of_job) for of_job in of_jobs.values()]
        made: list[bool]
        try:
            made = await attempts(StoreLost, math.inf, _log_loss)(self._store.write, self._owner, merged)
        except Exception:
            logger.exception("Jobs could not be written; they are given up here.")
            made = [False] * len(of_jobs)
        is_made = dict(zip(of_jobs, made, strict=True))
        for job_id, epoch in (of_job for of_job in of_jobs if not is_made[of_job]):
            self._on_lost(job_id, epoch)
        return [is_made[write.job_id, write.epoch] for write in writes]


def _merged_write(writes: Sequence[JobWrite]) -> JobWrite:
    """One write of a job that does what these do in their order."""
    added: dict[EntryName, bytes] = {}
    removed: set[EntryName] = set()
    for write in writes:
        added |= write.added
        for name in write.removed:
            added.pop(name, None)
        removed.update(write.removed)
    ended = next((write.ended for write in writes if write.ended), None)
    return replace(writes[0], added=added, removed=removed, ended=ended)


def _size_of(write: JobWrite) -> int:
    return sum(map(len, write.added.values()))


class JobJournal(ProgressLog):
    """Guarantees: a group is in exactly one event; with its event its turns leave the journal, and the ends of its
    rollouts are noted when the event is stored, by the process that has stored it."""

    def __init__(self, claim: Claim, writer: JobWriter, group_size: int) -> None:
        self._job_id, self._epoch = claim.record.job_id, claim.record.epoch
        self._writer = writer
        self._group_size = group_size
        self._episodes: dict[int, EpisodeState] = {}
        self._started: dict[int, SampleInput] = {}
        self._written: dict[tuple[int, int], tuple[int, int]] = {}
        """By position and restarts of the rollout: how many of the logs that it has left, and of the messages of its
        own, are in the journal."""
        self._entries_of: dict[int, list[EntryName]] = defaultdict(list)
        """By position."""
        self._ended: dict[int, tuple[EpisodeState, Callable[[], None]]] = {}
        """Rollouts that have ended and whose groups have no event yet, and the calls that note their ends."""
        self._noting = PacedWork[Callable[[], None]]()
        self._numbers = count(1 + max((name.number for name in claim.entries if name.kind == "journal"), default=0))
        self._last_event = claim.record.last_event
        self._has_ledger = False
        self._begun_groups = 0
        self.in_events: set[int] = set()
        """Positions of the rollouts that an event holds."""

    def load(self, journal: Mapping[EntryName, bytes], outlines: Iterable[bytes]) -> None:
        """Takes up what an earlier process has written."""
        for name, entry in sorted(journal.items()):
            if (position := read_entry(entry, self._episodes, self._started)) is not None:
                self._entries_of[position].append(name)
        for outline in outlines:
            ended = read_outline(outline)
            self.in_events.update(ended)
            self._episodes |= ended
        for position, state in self._episodes.items():
            self._written[position, state.restarts] = len(state.left), len(state.messages)
        self._begun_groups = 1 + max(self._episodes, default=-1) // self._group_size

    @property
    def started(self) -> Mapping[int, SampleInput]:
        return self._started

    async def note_started(self, samples: Mapping[int, SampleInput]) -> None:
        entries = await asyncio.to_thread(list, start_entries(samples))
        await self._store({self._next_entry(): entry for entry in entries})

    @property
    def begun_groups(self) -> int:
        return self._begun_groups

    def was_delivered(self, episode: Episode) -> bool:
        return episode.identity.position in self.in_events

    def restore(self, episodes: Iterable[Episode]) -> None:
        for episode in episodes:
            if (state := self._episodes.pop(episode.identity.position, None)) is not None:
                episode.restore(state)
            self._started.pop(episode.identity.group, None)

    async def turn_ended(self, episode: Episode) -> None:
        position = episode.identity.position
        if position in self.in_events:
            return
        left, written = self._written.get((position, episode.restarts), (0, 0))
        first = written if left == len(episode.log.left) else 0
        state = episode.state(first, left)
        self._written[position, episode.restarts] = len(episode.log.left), len(episode.log.added)
        tokens = sum(len(message.token_ids) for message in state.messages)
        if tokens > MOST_TOKENS_INLINE:
            entry = await asyncio.to_thread(turn_entry, position, first, state)
        else:
            entry = turn_entry(position, first, state)
        name = self._next_entry()
        self._entries_of[position].append(name)
        await self._store({name: entry})

    def ended(self, episode: Episode, note: Callable[[], None]) -> None:
        self._ended[episode.identity.position] = episode.state(), note

    async def begin_ledger(self, ranges: Sequence[SampleRange]) -> None:
        """The job plays the samples of these ranges: what each event delivers is remembered."""
        self._has_ledger = True
        await self._store({RANGES: ranges_entry(ranges)})

    def add_group(self, place: int, lines: Mapping[int, bytes], selected: tuple[int, int] | None) -> None:
        """All rollouts of a group have ended, with these lines by position in the answer.

        Args:
            place: that of its sample among those that are drawn.
            selected: in a job that selects groups, how many samples were drawn up to this group, and how many groups
                kept. Rollouts of the groups that were dropped before it leave the journal with it.
        """
        settled = list(lines)
        if selected is not None:
            settled = [position for position in self._ended if position < selected[0] * self._group_size]
        ended = {position: self._ended.pop(position) for position in settled}
        outlines = {position: state for position, (state, _) in ended.items()}
        ledger = None if selected is None else b"%d %d" % selected
        if selected is None and not PLAYED.isdisjoint(state.status for state in outlines.values()):
            ledger = b"%d" % place
        added = self._event(b"".join(lines[position] for position in sorted(lines)), ledger)
        added[EntryName("outline", self._last_event)] = outline_entry(outlines)
        removed = [name for position in settled for name in self._entries_of.pop(position, ())]
        self.in_events.update(settled)
        self._put(JobWrite(self._job_id, self._epoch, added, removed), [note for _, note in ended.values()])

    async def end(self, last_line: bytes, ended: Ended, selected: tuple[int, int] | None) -> None:
        """Returns when the last event is stored, and so all before it. Args: `selected` as in `add_group`."""
        added = self._event(last_line, None if selected is None else b"%d %d" % selected)
        # Rollouts of groups that are in no event are played by no process after this one.
        notes = [note for _, note in self._ended.values()]
        await self._writer.until_made(self._put(JobWrite(self._job_id, self._epoch, added, ended=ended), notes))

    def _event(self, data: bytes, ledger: bytes | None) -> dict[EntryName, bytes]:
        """The entries of the next event."""
        self._last_event += 1
        entries = {EntryName("event", self._last_event): data}
        if self._has_ledger and ledger is not None:
            entries[EntryName("ledger", self._last_event)] = ledger
        return entries

    async def _store(self, added: Mapping[EntryName, bytes]) -> None:
        await self._writer.write(JobWrite(self._job_id, self._epoch, added))

    def _put(self, write: JobWrite, notes: Sequence[Callable[[], None]]) -> "asyncio.Future[bool]":
        """Notes the ends of the rollouts that the write delivers, once it is made.

        If it is not made, the job is another process's, which delivers and notes them.
        """
        made = self._writer.put(write)
        made.add_done_callback(lambda made: self._noting.add(call, notes if made.result() else ()))
        return made

    def _next_entry(self) -> EntryName:
        return EntryName("journal", next(self._numbers))
