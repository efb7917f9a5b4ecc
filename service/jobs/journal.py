"""The journal of one job: each finished turn, and each finished group. The loop's port is `ProgressLog`."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from deployments.jobs.records import Claim
from deployments.storage.records import EntryName
from rollout_client.contract import SampleInput
from rollout_client.sample_range_contract import SampleRange
from service.jobs.entries import Progress, outline_entry, start_entries, turn_entry
from service.jobs.ledger import RANGES, ledger_entry, ranges_entry
from service.jobs.writer import JobWriter
from service.rollouts.episode import Episode
from service.rollouts.progress import EpisodeState, ProgressLog

MOST_TOKENS_INLINE = 8192
"""Of the messages of a turn that are encoded on the event loop."""


class JobJournal(ProgressLog):
    """Guarantees: a group is in exactly one event; with its event its turns leave the journal."""

    def __init__(self, claim: Claim, writer: JobWriter) -> None:
        self._job_id, self._epoch = claim.record.job_id, claim.record.epoch
        self._writer = writer
        self._progress = Progress()
        self._written: dict[int, tuple[int, int]] = {}
        """By position: how often the rollout was played anew, and how many of its messages are in the journal."""
        self._entries_of: dict[int, list[EntryName]] = defaultdict(list)
        """By position."""
        self._outlines: dict[int, EpisodeState] = {}
        """Of rollouts that have ended, whose groups have no event yet."""
        self._numbers = count(1 + max((name.number for name in claim.entries if name.kind == "journal"), default=0))
        self._next_event = claim.record.last_event + 1
        self._has_ledger = False
        self.in_events: set[int] = set()
        """Positions of the rollouts that an event holds."""

    def load(self, journal: Mapping[EntryName, bytes], outlines: Iterable[bytes]) -> None:
        """Takes up what an earlier process has written. In a thread, if it is large."""
        for name, entry in sorted(journal.items()):
            for position in self._progress.add(entry):
                self._entries_of[position].append(name)
        for outline in outlines:
            self.in_events.update(self._progress.add_outline(outline))
        for position, state in self._progress.episodes.items():
            self._written[position] = state.restarts, len(state.messages)

    @property
    def started(self) -> Mapping[int, SampleInput]:
        return self._progress.started

    async def note_started(self, samples: Mapping[int, SampleInput]) -> None:
        entries = await asyncio.to_thread(list, start_entries(samples))
        await self._writer.write(self._job_id, self._epoch, {self._next_entry(): entry for entry in entries})

    def restore(self, episodes: Iterable[Episode]) -> None:
        for episode in episodes:
            if (state := self._progress.episodes.pop(episode.identity.position, None)) is not None:
                episode.restore(state)
        self._progress = Progress()

    async def turn_ended(self, episode: Episode) -> None:
        position = episode.identity.position
        if position in self.in_events:
            return
        restarts, written = self._written.get(position, (0, 0))
        first = written if restarts == episode.restarts else 0
        state = episode.state(first)
        self._written[position] = state.restarts, episode.message_count
        tokens = sum(len(message.token_ids) for message in state.messages)
        if tokens > MOST_TOKENS_INLINE:
            entry = await asyncio.to_thread(turn_entry, position, first, state)
        else:
            entry = turn_entry(position, first, state)
        name = self._next_entry()
        self._entries_of[position].append(name)
        await self._writer.write(self._job_id, self._epoch, {name: entry})

    def ended(self, episode: Episode) -> None:
        if episode.identity.position not in self.in_events:
            self._outlines[episode.identity.position] = episode.state()

    async def begin_ledger(self, ranges: Sequence[SampleRange]) -> None:
        """The job plays the samples of these ranges: what each event delivers is remembered."""
        self._has_ledger = True
        await self._writer.write(self._job_id, self._epoch, {RANGES: ranges_entry(ranges)})

    def add_group(self, group: int, lines: Mapping[int, bytes]) -> None:
        """All rollouts of a group have ended, with these lines by position."""
        number = self._next_number()
        outlines = {position: self._outlines.pop(position) for position in lines}
        event = b"".join(lines[position] for position in sorted(lines))
        added = {EntryName("event", number): event, EntryName("outline", number): outline_entry(outlines)}
        if self._has_ledger:
            statuses = [state.status for state in outlines.values()]
            added[EntryName("ledger", number)] = ledger_entry(group, statuses)
        removed = [name for position in lines for name in self._entries_of.pop(position, ())]
        self.in_events.update(lines)
        self._writer.put(self._job_id, self._epoch, added, removed)

    async def end(self, last_line: bytes, completed: bool, forgets_key: bool = False) -> None:
        """Returns when the last event is stored, and so all before it."""
        added = {EntryName("event", self._next_number()): last_line}
        ended = self._writer.put(
            self._job_id, self._epoch, added, (), "completed" if completed else "failed", forgets_key
        )
        await asyncio.shield(ended)

    def _next_entry(self) -> EntryName:
        return EntryName("journal", next(self._numbers))

    def _next_number(self) -> int:
        self._next_event += 1
        return self._next_event - 1
