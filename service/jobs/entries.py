"""The bytes of journals and events, and what they say when they are read again. No I/O.

A journal entry is one JSON object: a turn (`position`, `first_message`, `state`), or samples that were started
(`started`). An outline is an array of turns whose messages have versions alone. An event is the lines of the rollouts
of a group as `service.rollout_requests.result_encoding` writes them, or the line of the summary or problem.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic_core import from_json

from deployments.protocols.generation import packed_ids, packed_logprobs
from rollout_client.contract import Message, SampleError, SampleInput, WeightVersionSpan
from rollout_client.set_fields import set_fields
from service.rollout_requests.json_encoder import json_of
from service.rollouts.progress import EpisodeState, MetricCounts

STARTS_PER_ENTRY = 64


@dataclass(slots=True)
class Progress:
    """What the entries of a job say."""

    episodes: dict[int, EpisodeState] = field(default_factory=dict)
    """By position in the response."""
    started: dict[int, SampleInput] = field(default_factory=dict)
    """By position in the request."""

    def add(self, entry: bytes) -> list[int]:
        """Adds a journal entry, in the order in which they were written. Returns the position of its rollout, if
        any."""
        fields = from_json(entry)
        if "started" in fields:
            self.started |= {position: SampleInput.model_validate(sample) for position, sample in fields["started"]}
            return []
        position, first, state = fields["position"], fields["first_message"], state_of(fields["state"])
        if first:
            before = self.episodes[position].messages[:first]
            state = replace(state, messages=[*before, *state.messages])
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
    """Args: `states` are those of ended rollouts, by position."""
    return json_of(
        [
            {"position": position, "first_message": 0, "state": fields_of(replace(state, messages=outlined(state)))}
            for position, state in states.items()
        ]
    )


def outlined(state: EpisodeState) -> list[Message]:
    """What metrics need of the messages: which versions generated their tokens."""
    return [
        Message.model_construct(
            role=message.role, content="", token_ids=[], generation_logprobs=[], weight_versions=message.weight_versions
        )
        for message in state.messages
        if message.weight_versions
    ]


def fields_of(state: EpisodeState) -> dict[str, Any]:
    fields = {name: getattr(state, name) for name in EpisodeState.__slots__}
    return {**fields, "metrics": asdict(state.metrics), "messages": [set_fields(message) for message in state.messages]}


def state_of(fields: dict[str, Any]) -> EpisodeState:
    """Counterpart of `fields_of`."""
    error = fields["error"]
    return EpisodeState(
        **{
            **fields,
            "messages": [message_of(message) for message in fields["messages"]],
            "stop_strings": tuple(fields["stop_strings"]),
            "metrics": MetricCounts(**fields["metrics"]),
            "error": None if error is None else SampleError.model_validate(error),
        }
    )


def message_of(fields: dict[str, Any]) -> Message:
    """What was validated before is not validated again. Numbers are packed as they were."""
    packed = {**fields, "token_ids": packed_ids(fields["token_ids"])}
    if (logprobs := fields.get("generation_logprobs")) is not None:
        packed["generation_logprobs"] = packed_if_exact(logprobs)
    if (spans := fields.get("weight_versions")) is not None:
        packed["weight_versions"] = [WeightVersionSpan.model_construct(**span) for span in spans]
    return Message.model_construct(**packed)


def packed_if_exact(logprobs: list[float]) -> "Sequence[float] | array[float]":
    """Those of the engine are float32; a posted message log may hold others."""
    packed = packed_logprobs(logprobs)
    return packed if packed.tolist() == logprobs else logprobs
