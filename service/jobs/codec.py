"""The codec of a job's entries: what is kept of its turns, starts and ended rollouts, and of what it has delivered.
No I/O.

A journal entry is one JSON object: a turn (`position`, `first_message`, `state`), samples that were started
(`started`). An outline is an array of turns whose messages have versions alone.

The ledger says what a job over a data set has delivered; the cursor of the samples that are left is made of it. A group
has failed when none of its rollouts was played to its end: nothing of it can be trained on, so its sample is left. An
entry of the ledger is the place of a delivered group among the samples of the request; in a job that selects groups,
which come in the order of their samples, it is how many samples were drawn, and how many groups kept.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import from_json

from deployments.protocols.generation import packed_ids, packed_logprobs
from deployments.protocols.token_columns import RoutedExperts
from deployments.storage.storage import EntryName
from rollout_client.contract.base import set_fields
from rollout_client.contract.jobs import JobCursor
from rollout_client.contract.messages import (
    COLUMN_FIELDS,
    Branch,
    MediaRange,
    Message,
    PackedNumbers,
    WeightVersionSpan,
)
from rollout_client.contract.rollouts import SampleError, SampleInput, SampleStatus
from rollout_client.contract.selection import PlaceRange, SampleRange
from service.rollout_requests.result_encoding import json_of
from service.rollout_requests.sample_ranges import moved_past, pieces_of
from service.rollouts.episode_records import EpisodeState, PlayedGeneration
from service.rollouts.metrics import MetricCounts

STARTS_PER_ENTRY = 64


def read_entry(entry: bytes, episodes: dict[int, EpisodeState], started: dict[int, SampleInput]) -> int | None:
    """Adds a journal entry to what the entries before it have told. Returns the position of its rollout, if any.

    Args:
        episodes: by position in the response.
        started: by position in the request.
    """
    fields = from_json(entry)
    if "started" in fields:
        started.update((position, SampleInput.model_validate(sample)) for position, sample in fields["started"])
        return None
    position: int = fields["position"]
    first, state = fields["first_message"], _state_of(fields["state"])
    earlier = episodes.get(position)
    if earlier is not None and earlier.restarts == state.restarts:
        made = (made for made in earlier.generations if made.message < first)
        state = replace(
            state,
            messages=[*earlier.messages[:first], *state.messages],
            left=[*earlier.left, *state.left],
            generations=(*made, *state.generations),
            before=(*earlier.before, earlier.turn_state),
        )
    episodes[position] = state
    return position


def read_outline(outline: bytes) -> dict[int, EpisodeState]:
    """The states of its rollouts, by position."""
    return {turn["position"]: _state_of(turn["state"]) for turn in from_json(outline)}


def turn_entry(position: int, first_message: int, state: EpisodeState) -> bytes:
    return json_of(_turn(position, first_message, state))


def start_entries(samples: Mapping[int, SampleInput]) -> Iterator[bytes]:
    items = [(position, set_fields(sample)) for position, sample in samples.items()]
    for begin in range(0, len(items), STARTS_PER_ENTRY):
        yield json_of({"started": items[begin : begin + STARTS_PER_ENTRY]})


def outline_entry(states: Mapping[int, EpisodeState]) -> bytes:
    """The outline of ended rollouts; `states` is by position."""
    return json_of([_turn(position, 0, _outlined(state)) for position, state in states.items()])


def _turn(position: int, first_message: int, state: EpisodeState) -> dict[str, Any]:
    return {"position": position, "first_message": first_message, "state": _fields_of(state)}


def _outlined(state: EpisodeState) -> EpisodeState:
    """The parts that metrics need; of the messages which versions generated their tokens."""
    messages = [
        Message.model_construct(
            role=message.role, content="", token_ids=[], generation_logprobs=[], weight_versions=message.weight_versions
        )
        for message in chain(state.messages, *(branch.message_log for branch in state.left))
        if message.weight_versions
    ]
    return replace(state, messages=messages, left=[], experts=None, generations=())


def _fields_of(state: EpisodeState) -> dict[str, Any]:
    """The fields as `json_of` encodes them, without the states of earlier turns: those are in earlier entries."""
    return {
        **{name: getattr(state, name) for name in EpisodeState.__slots__ if name != "before"},
        "experts": None if state.experts is None else state.experts.packed(),
        "messages": [set_fields(message) for message in state.messages],
    }


def _state_of(fields: dict[str, Any]) -> EpisodeState:
    """Counterpart of `_fields_of`, for what JSON has made of them."""
    error, experts = fields["error"], fields["experts"]
    return EpisodeState(
        **{
            **fields,
            "experts": None if experts is None else RoutedExperts(all_rows=PackedNumbers.model_validate(experts)),
            "messages": [_message_of(message) for message in fields["messages"]],
            "left": [*map(Branch.model_validate, fields["left"])],
            "stop_strings": tuple(fields["stop_strings"]),
            "metrics": MetricCounts(**fields["metrics"]),
            "generations": tuple(
                PlayedGeneration(**{**made, "stop_strings": tuple(made["stop_strings"])})
                for made in fields["generations"]
            ),
            "error": None if error is None else SampleError.model_validate(error),
        }
    )


def _message_of(fields: dict[str, Any]) -> Message:
    """The message, without validation: it was validated before it was written. Numbers are packed as they were."""
    packed = {**fields, "token_ids": packed_ids(fields["token_ids"])}
    if (logprobs := fields.get("generation_logprobs")) is not None:
        packed["generation_logprobs"] = _packed_if_exact(logprobs)
    if (spans := fields.get("weight_versions")) is not None:
        packed["weight_versions"] = [WeightVersionSpan.model_construct(**span) for span in spans]
    if (ranges := fields.get("mm_ranges")) is not None:
        packed["mm_ranges"] = [MediaRange.model_construct(**shown) for shown in ranges]
    for name in fields.keys() & COLUMN_FIELDS:
        # A caller may have posted a null.
        packed[name] = None if fields[name] is None else PackedNumbers.model_validate(fields[name])
    return Message.model_construct(**packed)


def _packed_if_exact(logprobs: list[float]) -> "Sequence[float] | array[float]":
    """Those of the engine are float32; a posted message log may hold others."""
    packed = packed_logprobs(logprobs)
    return packed if packed.tolist() == logprobs else logprobs


RANGES = EntryName("ledger", 0)
"""The entry of the job's ranges, in JSON."""
PLAYED: frozenset[SampleStatus | None] = frozenset(("completed", "truncated", "max_turns"))
"""The statuses of rollouts that were played to their ends."""
_ranges_adapter = TypeAdapter(list[SampleRange])


def ranges_entry(ranges: Sequence[SampleRange]) -> bytes:
    return _ranges_adapter.dump_json(list(ranges), exclude_unset=True)


def ranges_in(entry: bytes) -> list[SampleRange]:
    return _ranges_adapter.validate_json(entry)


def cursor_of(job_id: str, event: int, ledger: Mapping[EntryName, bytes]) -> JobCursor:
    """The cursor after `event`. `ledger` has the entries of the events up to it, and that of the ranges."""
    ranges = ranges_in(ledger[RANGES])
    # Earlier versions of the service have stored `7 failed` of a group that is left, and `9 kept 3`.
    stored = [entry for name, entry in ledger.items() if name != RANGES and not entry.endswith(b"failed")]
    entries = [tuple(map(int, entry.replace(b"kept", b"").split())) for entry in stored]
    if entries and len(entries[0]) > 1:
        drawn, kept = max(entries)
        return JobCursor(job_id=job_id, event=event, samples_from=moved_past(ranges, drawn), kept=kept)
    left = list(_ranges_without(ranges, {group for (group,) in entries}))
    return JobCursor(job_id=job_id, event=event, samples_from=left)


def _ranges_without(ranges: Iterable[SampleRange], groups: Collection[int]) -> Iterator[SampleRange]:
    """The ranges, which leave these groups out as well.

    Args:
        groups: places among the samples of all ranges.
    """
    numbers = count()
    for drawn in ranges:
        places = (place for piece in pieces_of(drawn) for place in range(piece.start, piece.end))
        left = {place for place in places if next(numbers) not in groups}
        without = [place for place in range(drawn.start, drawn.end) if place not in left]
        yield drawn.model_copy(update={"without": _runs(without)})


def _runs(places: Sequence[int]) -> list[PlaceRange]:
    """The places, which ascend, as ranges of those that follow one another."""
    known = set(places)
    starts = [place for place in places if place - 1 not in known]
    ends = [place + 1 for place in places if place + 1 not in known]
    return [PlaceRange(start=start, count=end - start) for start, end in zip(starts, ends, strict=True)]
