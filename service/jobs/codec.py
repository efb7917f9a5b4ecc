"""The codec of a job's entries: what is kept of its turns, starts and ended rollouts. No I/O.

A journal entry is one JSON object: a turn (`position`, `first_message`, `state`), samples that were started
(`started`). An outline is an array of turns whose messages have versions alone.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from deployments.protocols.generation import packed_ids, packed_logprobs
from deployments.protocols.token_columns import RoutedExperts
from rollout_client.contract.base import set_fields
from rollout_client.contract.messages import COLUMN_FIELDS, MediaRange, Message, PackedNumbers, WeightVersionSpan
from rollout_client.contract.rollouts import SampleError, SampleInput
from service.rollout_requests.result_encoding import json_of
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
    first, state = fields["first_message"], state_of(fields["state"])
    if first:
        earlier = episodes[position]
        made = (made for made in earlier.generations if made.message < first)
        state = replace(
            state,
            messages=[*earlier.messages[:first], *state.messages],
            generations=(*made, *state.generations),
            before=(*earlier.before, earlier.turn_state),
        )
    episodes[position] = state
    return position


def read_outline(outline: bytes) -> dict[int, EpisodeState]:
    """The states of its rollouts, by position."""
    return {turn["position"]: state_of(turn["state"]) for turn in from_json(outline)}


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
                "state": fields_of(replace(state, messages=_outlined(state), experts=None, generations=())),
            }
            for position, state in states.items()
        ]
    )


def _outlined(state: EpisodeState) -> list[Message]:
    """The parts of the messages that metrics need: which versions generated their tokens."""
    return [
        Message.model_construct(
            role=message.role, content="", token_ids=[], generation_logprobs=[], weight_versions=message.weight_versions
        )
        for message in state.messages
        if message.weight_versions
    ]


def fields_of(state: EpisodeState) -> dict[str, Any]:
    """The fields as `json_of` encodes them, without the states of earlier turns: those are in earlier entries."""
    return {
        **{name: getattr(state, name) for name in EpisodeState.__slots__ if name != "before"},
        "experts": None if state.experts is None else state.experts.packed(),
        "messages": [set_fields(message) for message in state.messages],
    }


def state_of(fields: dict[str, Any]) -> EpisodeState:
    """Counterpart of `fields_of`, for what JSON has made of them."""
    error, experts = fields["error"], fields["experts"]
    return EpisodeState(
        **{
            **fields,
            "experts": None if experts is None else RoutedExperts(all_rows=PackedNumbers.model_validate(experts)),
            "messages": [_message_of(message) for message in fields["messages"]],
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
