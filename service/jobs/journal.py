"""The journal of one job: each finished turn, and each finished group. The loop's port is `ProgressLog`.

A journal entry is one JSON object: a turn (`position`, `first_message`, `state`), samples that were started
(`started`), or names of images by address (`fetched`). An outline is an array of turns whose messages have versions
alone. An event is the lines of the rollouts of a group as the service's NDJSON stream has them, or the line of the
summary or problem. The functions that write and read these bytes do no I/O.
"""

import asyncio
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import count
from typing import Any

from pydantic_core import from_json

from deployments.jobs.records import Claim, Ended, JobWrite
from deployments.protocols.generation import packed_ids, packed_logprobs
from deployments.protocols.token_columns import RoutedExperts
from deployments.storage.storage import EntryName
from rollout_client.contract.base import set_fields
from rollout_client.contract.messages import COLUMN_FIELDS, MediaRange, Message, PackedNumbers, WeightVersionSpan
from rollout_client.contract.rollouts import SampleError, SampleInput
from rollout_client.contract.sample_ranges import SampleRange
from service.jobs.ledger import RANGES, ledger_entry, ranges_entry, selection_entry
from service.jobs.writer import JobWriter
from service.rollout_requests.result_encoding import json_of
from service.rollouts.episode import Episode
from service.rollouts.episode_records import EpisodeState, MetricCounts, PlayedGeneration
from service.rollouts.pacing import PacedWork
from service.rollouts.progress import ProgressLog

STARTS_PER_ENTRY = 64


@dataclass(slots=True)
class JournalProgress:
    """The decoded journal of a job."""

    episodes: dict[int, EpisodeState] = field(default_factory=dict)
    """By position in the response."""
    started: dict[int, SampleInput] = field(default_factory=dict)
    """By position in the request."""
    fetched: dict[str, str] = field(default_factory=dict)
    """The names of images, by address."""

    def add(self, entry: bytes) -> list[int]:
        """Adds a journal entry, in the order in which they were written. Returns the position of its rollout, if
        any."""
        fields = from_json(entry)
        if "started" in fields:
            self.started |= {position: SampleInput.model_validate(sample) for position, sample in fields["started"]}
            return []
        if "fetched" in fields:
            self.fetched |= fields["fetched"]
            return []
        position, first, state = fields["position"], fields["first_message"], state_of(fields["state"])
        if first:
            earlier = self.episodes[position]
            made = (made for made in earlier.generations if made.message < first)
            state = replace(
                state,
                messages=[*earlier.messages[:first], *state.messages],
                generations=(*made, *state.generations),
                before=(*earlier.before, earlier.turn_state),
            )
        self.episodes[position] = state
        return [position]

    def add_outline(self, outline: bytes) -> list[int]:
        """Returns the positions of its rollouts."""
        turns = from_json(outline)
        self.episodes |= {turn["position"]: state_of(turn["state"]) for turn in turns}
        return [turn["position"] for turn in turns]


def turn_entry(position: int, first_message: int, state: EpisodeState) -> bytes:
    return json_of({"position": position, "first_message": first_message, "state": fields_of(state)})


def start_entries(samples: Mapping[int, SampleInput]) -> Iterator[bytes]:
    items = [(position, set_fields(sample)) for position, sample in samples.items()]
    for begin in range(0, len(items), STARTS_PER_ENTRY):
        yield json_of({"started": items[begin : begin + STARTS_PER_ENTRY]})


def outline_entry(states: Mapping[int, EpisodeState]) -> bytes:
    """The outline of ended rollouts; `states` is by position."""
    return json_of(
        [
            {
                "position": position,
                "first_message": 0,
                "state": fields_of(replace(state, messages=outlined(state), experts=None, generations=())),
            }
            for position, state in states.items()
        ]
    )


def outlined(state: EpisodeState) -> list[Message]:
    """The parts of the messages that metrics need: which versions generated their tokens."""
    return [
        Message.model_construct(
            role=message.role, content="", token_ids=[], generation_logprobs=[], weight_versions=message.weight_versions
        )
        for message in state.messages
        if message.weight_versions
    ]


def fields_of(state: EpisodeState) -> dict[str, Any]:
    fields = {name: getattr(state, name) for name in EpisodeState.__slots__ if name != "before"}
    # As before there were any: a service of that version can take the job over.
    if state.experts is None:
        del fields["experts"]
    else:
        fields["experts"] = state.experts.packed()
    if not state.shadow_rewards:
        del fields["shadow_rewards"]
    fields["generations"] = [astuple(made) for made in state.generations]
    if not state.generations:
        del fields["generations"]
    return {**fields, "metrics": asdict(state.metrics), "messages": [set_fields(message) for message in state.messages]}


def state_of(fields: dict[str, Any]) -> EpisodeState:
    """Counterpart of `fields_of`."""
    error, experts = fields["error"], fields.get("experts")
    return EpisodeState(
        **{
            **fields,
            "experts": None if experts is None else RoutedExperts(all_rows=PackedNumbers.model_validate(experts)),
            "messages": [message_of(message) for message in fields["messages"]],
            "stop_strings": tuple(fields["stop_strings"]),
            "metrics": MetricCounts(**fields["metrics"]),
            "generations": tuple(
                PlayedGeneration(
                    **{**dict(zip(PlayedGeneration.__slots__, made, strict=True)), "stop_strings": tuple(made[4])}
                )
                for made in fields.get("generations", ())
            ),
            "error": None if error is None else SampleError.model_validate(error),
        }
    )


def message_of(fields: dict[str, Any]) -> Message:
    """The message, without validation: it was validated before it was written. Numbers are packed as they were."""
    packed = {**fields, "token_ids": packed_ids(fields["token_ids"])}
    if (logprobs := fields.get("generation_logprobs")) is not None:
        packed["generation_logprobs"] = packed_if_exact(logprobs)
    if (spans := fields.get("weight_versions")) is not None:
        packed["weight_versions"] = [WeightVersionSpan.model_construct(**span) for span in spans]
    if (ranges := fields.get("mm_ranges")) is not None:
        packed["mm_ranges"] = [MediaRange.model_construct(**shown) for shown in ranges]
    for name in fields.keys() & COLUMN_FIELDS:
        # A caller may have posted a null.
        packed[name] = None if fields[name] is None else PackedNumbers.model_validate(fields[name])
    return Message.model_construct(**packed)


def packed_if_exact(logprobs: list[float]) -> "Sequence[float] | array[float]":
    """Those of the engine are float32; a posted message log may hold others."""
    packed = packed_logprobs(logprobs)
    return packed if packed.tolist() == logprobs else logprobs


MOST_TOKENS_INLINE = 8192
"""Bound of the messages of a turn that are encoded on the event loop."""


class JobJournal(ProgressLog):
    """Guarantees: a group is in exactly one event; with its event its turns leave the journal, and the ends of its
    rollouts are noted when the event is stored, by the process that has stored it."""

    def __init__(self, claim: Claim, writer: JobWriter) -> None:
        self._job_id, self._epoch = claim.record.job_id, claim.record.epoch
        self._writer = writer
        self._progress = JournalProgress()
        self._written: dict[int, tuple[int, int]] = {}
        """By position: the restarts of the rollout, and how many of its messages are in the journal."""
        self._entries_of: dict[int, list[EntryName]] = defaultdict(list)
        """By position."""
        self._outlines: dict[int, EpisodeState] = {}
        """Rollouts that have ended and whose groups have no event yet."""
        self._notes: dict[int, Callable[[], None]] = {}
        """Their ends are noted by these calls."""
        self._noting = PacedWork[Callable[[], None]]()
        self._numbers = count(1 + max((name.number for name in claim.entries if name.kind == "journal"), default=0))
        self._next_event = claim.record.last_event + 1
        self._has_ledger = False
        self._begun_groups = 0
        self.in_events: set[int] = set()
        """Positions of the rollouts that an event holds."""

    def load(self, journal: Mapping[EntryName, bytes], outlines: Iterable[bytes], group_size: int) -> None:
        """Takes up what an earlier process has written. In a thread, if it is large."""
        for name, entry in sorted(journal.items()):
            for position in self._progress.add(entry):
                self._entries_of[position].append(name)
        for outline in outlines:
            self.in_events.update(self._progress.add_outline(outline))
        for position, state in self._progress.episodes.items():
            self._written[position] = state.restarts, len(state.messages)
        self._begun_groups = 1 + max(self._progress.episodes, default=-1) // group_size

    @property
    def started(self) -> Mapping[int, SampleInput]:
        return self._progress.started

    async def note_started(self, samples: Mapping[int, SampleInput]) -> None:
        entries = await asyncio.to_thread(list, start_entries(samples))
        await self._writer.write(self._write({self._next_entry(): entry for entry in entries}))

    @property
    def fetched(self) -> Mapping[str, str]:
        return self._progress.fetched

    async def note_fetched(self, names: Mapping[str, str]) -> None:
        await self._writer.write(self._write({self._next_entry(): json_of({"fetched": dict(names)})}))

    @property
    def begun_groups(self) -> int:
        return self._begun_groups

    def was_delivered(self, episode: Episode) -> bool:
        return episode.identity.position in self.in_events

    def restore(self, episodes: Iterable[Episode]) -> None:
        for episode in episodes:
            if (state := self._progress.episodes.pop(episode.identity.position, None)) is not None:
                episode.restore(state)
            self._progress.started.pop(episode.identity.group, None)

    async def turn_ended(self, episode: Episode) -> None:
        position = episode.identity.position
        if position in self.in_events:
            return
        restarts, written = self._written.get(position, (0, 0))
        first = written if restarts == episode.restarts else 0
        state = episode.state(first)
        self._written[position] = state.restarts, len(episode.log.added)
        tokens = sum(len(message.token_ids) for message in state.messages)
        if tokens > MOST_TOKENS_INLINE:
            entry = await asyncio.to_thread(turn_entry, position, first, state)
        else:
            entry = turn_entry(position, first, state)
        name = self._next_entry()
        self._entries_of[position].append(name)
        await self._writer.write(self._write({name: entry}))

    def ended(self, episode: Episode, note: Callable[[], None]) -> None:
        position = episode.identity.position
        self._outlines[position] = episode.state()
        self._notes[position] = note

    async def begin_ledger(self, ranges: Sequence[SampleRange]) -> None:
        """The job plays the samples of these ranges: what each event delivers is remembered."""
        self._has_ledger = True
        await self._writer.write(self._write({RANGES: ranges_entry(ranges)}))

    def add_group(
        self, group: int, lines: Mapping[int, bytes], settled_before: int | None = None, kept: int | None = None
    ) -> None:
        """All rollouts of a group have ended, with these lines by position in the answer.

        Args:
            group: the place of its sample among those that are drawn.
            settled_before: the rollouts at positions below this leave the journal, those of groups that were dropped
                before it included; by default those of `lines`.
            kept: how many groups are in events with this one, in a job that selects groups.
        """
        number = self._next_number()
        if settled_before is None:
            settled = list(lines)
        else:
            settled = [position for position in self._outlines if position < settled_before]
        outlines = {position: self._outlines.pop(position) for position in settled}
        event = b"".join(lines[position] for position in sorted(lines))
        added = {EntryName("event", number): event, EntryName("outline", number): outline_entry(outlines)}
        if self._has_ledger:
            statuses = [state.status for state in outlines.values()]
            entry = ledger_entry(group, statuses) if kept is None else selection_entry(group + 1, kept)
            added[EntryName("ledger", number)] = entry
        removed = [name for position in settled for name in self._entries_of.pop(position, ())]
        self.in_events.update(settled)
        self._put(replace(self._write(added), removed=removed), [self._notes.pop(position) for position in settled])

    async def end(
        self, last_line: bytes, completed: bool, forgets_key: bool = False, selected: tuple[int, int] | None = None
    ) -> None:
        """Returns when the last event is stored, and so all before it.

        Args:
            selected: how many samples a job that selects groups has drawn, and how many groups it has kept.
        """
        number = self._next_number()
        added = {EntryName("event", number): last_line}
        if self._has_ledger and selected is not None:
            added[EntryName("ledger", number)] = selection_entry(*selected)
        ended: Ended = "completed" if completed else "failed"
        # Rollouts of groups that are in no event are played by no process after this one.
        notes, self._notes = self._notes, {}
        write = replace(self._write(added), ended=ended, forgets_key=forgets_key)
        await self._writer.until_made(self._put(write, list(notes.values())))

    def _put(self, write: JobWrite, notes: Sequence[Callable[[], None]]) -> "asyncio.Future[bool]":
        """Notes the ends of the rollouts that the write delivers, once it is made.

        If it is not made, the job is another process's, which delivers and notes them.
        """
        made = self._writer.put(write)
        made.add_done_callback(lambda made: self._noting.add(call, notes if made.result() else ()))
        return made

    def _write(self, added: Mapping[EntryName, bytes]) -> JobWrite:
        return JobWrite(self._job_id, self._epoch, added)

    def _next_entry(self) -> EntryName:
        return EntryName("journal", next(self._numbers))

    def _next_number(self) -> int:
        self._next_event += 1
        return self._next_event - 1


def call(note: Callable[[], None]) -> None:
    note()
