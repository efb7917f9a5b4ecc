"""An evaluation that has ended or was interrupted, and what other evaluators' formats say of it in common. No I/O."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Literal
from uuid import UUID, uuid4, uuid5

from pydantic_core import to_json

from rollout_client.contract.info import ServiceInfo
from rollout_client.contract.messages import JsonObject, Message
from rollout_client.contract.rollouts import RolloutRequest, SampleResult
from rollout_client.data_out.training_rows import template_message
from rollout_client.results import final_reward

EvaluationStatus = Literal["success", "cancelled", "error"]
PROVIDER = "rollout"
"""Provider of the model in names of the form `provider/model`: this service."""
PHASES = ("sandbox_create_s", "agent_run_s", "verifier_s", "sandbox_destroy_s")
"""The metrics of a rollout of a Harbor task that hold the seconds of its phases, in their order."""
AGENT_SECONDS = "agent_s"
"""The metric that holds the seconds of all phases."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One rollout of an evaluation."""

    row: int
    """Row of its sample, from 0."""
    name: str
    """Name of its sample, which no other row has."""
    result: SampleResult
    ended_at: datetime
    id: UUID

    @property
    def reward(self) -> float | None:
        return final_reward(self.result)

    @property
    def rewards(self) -> dict[str, float]:
        """The rewards by name; empty without a final one."""
        if self.reward is None:
            return {}
        return self.result.rewards or {"reward": self.reward}

    @property
    def begun_at(self) -> datetime | None:
        """Counted back from the end by the seconds that its agent took; `None` where no agent has played it."""
        seconds = self.result.metrics.environment.get(AGENT_SECONDS)
        return None if seconds is None else self.ended_at - timedelta(seconds=seconds)

    @property
    def phases(self) -> dict[str, tuple[datetime, datetime]]:
        """Begin and end of each of `PHASES`, counted back from the end; empty where there are none."""
        seconds = self.result.metrics.environment
        found: dict[str, tuple[datetime, datetime]] = {}
        end = self.ended_at
        for phase in reversed(PHASES):
            if phase in seconds:
                begin = end - timedelta(seconds=seconds[phase])
                found[phase], end = (begin, end), begin
        return found

    @property
    def input_tokens(self) -> int | None:
        """Sum over the generations; `None` where the service does not tell that of each of them."""
        metrics = self.result.metrics
        return sum(metrics.turn_input_tokens) if len(metrics.turn_input_tokens) == metrics.turn_count else None

    @property
    def weight_versions(self) -> list[str]:
        return sorted({span.version for message in self.result.message_log for span in message.weight_versions or ()})


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The samples that were to be played, how far it came, and the result.

    Args:
        samples: those that were to be played, by row, each with its `task_name`.
        groups: the rollouts of each row that was played.
        arrivals: when a rollout arrived, by row and generation; `begun_at` for those that were played before.
        options: the options of the request.
        pass_at_k: by task and k; without those that are unknown.
        document: figures and options for which the formats have no place of their own, as JSON.
        reason: why it did not come to its end; empty where it did.
    """

    samples: Sequence[Mapping[str, Any]]
    groups: Mapping[int, Sequence[SampleResult]]
    arrivals: Mapping[tuple[int, int], datetime]
    options: Mapping[str, Any]
    url: str
    info: ServiceInfo
    begun_at: datetime
    ended_at: datetime
    pass_at_k: Mapping[str, Mapping[int, float]]
    document: Mapping[str, Any]
    status: EvaluationStatus = "success"
    reason: str = ""

    @cached_property
    def id(self) -> UUID:
        return uuid4()

    @property
    def model(self) -> str:
        return f"{PROVIDER}/{self.info.model.name}"

    @property
    def num_generations(self) -> int:
        return self.options.get("num_generations") or 1

    @property
    def max_rollout_turns(self) -> int:
        return self.options.get("max_rollout_turns") or int(RolloutRequest.model_fields["max_rollout_turns"].default)

    @property
    def max_seq_len(self) -> int:
        return self.options.get("max_seq_len") or self.info.model.max_model_len

    @cached_property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(str(sample["task_name"]) for sample in self.samples))

    @cached_property
    def names(self) -> list[str]:
        """The `id` of each sample, with its row where it has none, or another sample has the same."""
        ids = [str(sample.get("id") or "") for sample in self.samples]
        counts = Counter(ids)
        names = []
        for row, name in enumerate(ids):
            if not name or counts[name] > 1:
                name = f"{name or self.samples[row]['task_name']}#{row}"
                # Only an id that was given can be the same: each row makes another name.
                while name in counts:
                    name += "#"
            names.append(name)
        return names

    @cached_property
    def trials(self) -> list[Trial]:
        """All that have ended, by row and generation."""
        return [
            Trial(
                row,
                self.names[row],
                result,
                self.arrivals.get((row, result.generation_index), self.begun_at),
                uuid5(self.id, f"{row}/{result.generation_index}"),
            )
            for row, group in sorted(self.groups.items())
            for result in group
        ]


def calls_of(message: Message) -> Iterator[tuple[str, str, JsonObject, str | None]]:
    """Id, function and arguments of each call of a message, and its arguments as text where they are no object."""
    calls: Any = template_message(message).get("tool_calls") or []
    for number, call in enumerate(calls):
        function = call.get("function") or {}
        arguments = function.get("arguments")
        unread = None if isinstance(arguments, dict) else str(arguments)
        given: JsonObject = arguments if isinstance(arguments, dict) else {}
        yield str(call.get("id") or f"call-{number}"), str(function.get("name", "")), given, unread


def facts_of(message: Message) -> JsonObject:
    """Fields of a message for which the formats have no place of their own; images by their names."""
    found = message.model_dump(
        mode="json",
        include={"name", "reward", "finish_reason", "weight_versions", "parse_error", "constrained", "sampled_with"},
        exclude_none=True,
    )
    if message.role == "environment":
        found["role"] = message.role
    if message.mm_ranges:
        found["images"] = [shown.media for shown in message.mm_ranges]
    return found


def json_of(value: Any) -> bytes:
    return to_json(value, indent=1, inf_nan_mode="constants") + b"\n"


def file_name(text: str) -> str:
    """The text as the name of a file or folder; different texts may have the same."""
    return re.sub(r"[^\w.-]+", "-", text)[:80].strip(".-") or "sample"
