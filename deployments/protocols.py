"""What a rollout needs from the outside: something that generates and something that steps.

The loop knows only these two protocols and the records that travel through them. The generator and the environment
deployments stand behind them (`service/hops.py`); tests implement them with scripts.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from pydantic import FiniteFloat, GetPydanticSchema, JsonValue
from typing_extensions import TypedDict

from rollout_client.contract import Role, StopString

JsonObject = Annotated[dict[str, Any], GetPydanticSchema(lambda _, schema_of: schema_of(dict[str, JsonValue]))]
"""Validated as JSON all the way down; typed so that a `dict[str, int]` is one."""


def packed_ids(token_ids: Iterable[int]) -> "array[int]":
    """Four bytes each, in memory and on the way, where a list takes 36; and nine times quicker to pickle and read."""
    return array("i", token_ids)


def packed_logprobs(logprobs: Iterable[float]) -> "array[float]":
    """Four bytes each, as wide as the engine computes them."""
    return array("f", logprobs)


class ChatMessage(TypedDict):
    """A message as environments and chat templates see it: no tokens."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 keeps all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation: the ids of the whole conversation in, at most `max_new_tokens` (>= 1) ids out."""

    request_id: str
    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    stop_strings: tuple[str, ...]
    sampling: SamplingOptions
    min_weight_version: int = 0
    """A replica whose weights are older does not take it."""
    rollout_id: str = ""
    """The rollout that this is a turn of; all of them begin with the same tokens."""
    group: str = ""
    """Conversations of one group begin with the same prompt."""


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens `[start, end)` of a generation were sampled by the weights called `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Generation:
    """What came out: `logprobs[i]` is the natural log-probability of `token_ids[i]` in the sampled distribution."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length"]
    weight_versions: tuple[WeightSpan, ...] = ()


class Generator(Protocol):
    async def generate(self, request: GenerationRequest) -> Generation:
        """Raises `GenerationRejected`, `GenerationLost`, `Overloaded`. Cancelling the call aborts the generation."""
        ...

    def release(self, rollout_id: str) -> None:
        """The conversation has no further turn."""
        ...


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One environment step: the conversation so far and what the environment asked to be handed back."""

    message_log: list[ChatMessage]
    extra_env_info: dict[str, Any]
    rollout_id: str = ""
    """The rollout that this is a step of, for logs."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The environment's answer to one step.

    `reward` is one number or several by name; `metadata` is the next `extra_env_info` and `next_stop_strings` the stop
    strings from the next turn on, `None` leaving either as it was; `answer` is what was read out of the response.
    """

    observation: ChatMessage
    reward: FiniteFloat | dict[str, FiniteFloat]
    terminated: bool
    metadata: JsonObject | None = None
    next_stop_strings: list[StopString] | None = None
    answer: str | None = None


class Environment(Protocol):
    async def step(self, request: StepRequest) -> StepOutcome:
        """Raises `EnvironmentRejected`, `EnvironmentBroken`, `EnvironmentLost`."""
        ...


@dataclass(frozen=True, slots=True)
class TaskDescription:
    """What `/tasks` says of an environment; `fields` is the JSON schema of its `extra_env_info`."""

    task_name: str
    description: str
    fields: dict[str, Any]
    example: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefixCacheTokens:
    """Of all prompts so far, the tokens that the engine looked up in its prefix cache, and those found there."""

    looked_up: int
    found: int


@dataclass(frozen=True, slots=True)
class GeneratorDescription:
    """What the engine behind the generator can take: lengths in tokens."""

    model: str
    max_model_len: int
    vocab_size: int
