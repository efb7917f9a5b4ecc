"""The contract of `POST /rollout`: what travels between a trainer and the service.

Requests are strict (an unknown field is an error, never ignored), except that a sample may carry further fields, which
come back untouched. Lengths are in tokens, times in seconds, log-probabilities natural.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

Role = Literal["system", "user", "assistant", "tool", "environment"]
SampleStatus = Literal["completed", "truncated", "max_turns", "deadline", "cancelled", "error"]
FailureKind = Literal["request", "generation", "environment", "timeout", "overload", "internal"]
FinishReason = Literal["stop", "length"]
ObservationFormat = Literal["chat", "raw"]
TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1)]
LOWEST_TEMPERATURE = 0.01
JsonObject = dict[str, JsonValue]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Strict(BaseModel):
    """What a caller sends: a field that is not known is a mistake."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Lenient(BaseModel):
    """What the service answers: a client goes on understanding a service that has learnt to say more."""

    model_config = ConfigDict(extra="allow")


class PromptMessage(Strict):
    """A message as the chat template takes it."""

    role: Role
    content: str
    name: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None


class WeightVersionSpan(Lenient):
    """Tokens `[start, end)` of the message were sampled by the weights called `version`."""

    version: Annotated[str, Field(pattern=r"^[0-9]+$")]
    start: int = Field(ge=0)
    end: int = Field(ge=0)


class Message(Lenient):
    """A message with its tokens. The concatenated `token_ids` of a log are exactly what the engine saw."""

    role: Role
    content: str
    token_ids: list[TokenId]
    generation_logprobs: list[float] | None = None
    """One per token of a generated message, natural, under the distribution that was sampled from (after temperature,
    top-p, top-k and min-p); for greedy decoding, that of temperature 1. Messages without are no tokens of the policy:
    mask them out of the loss."""
    finish_reason: FinishReason | None = None
    """`stop`: end token or stop string; `length`: `max_new_tokens` or `max_seq_len` was reached."""
    weight_versions: list[WeightVersionSpan] | None = None
    reward: float | None = None
    """What the environment gave for this message."""


class GivenMessage(Message):
    """A message of a `message_log` that is posted; one that came back from the service is taken as it is."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, from_attributes=True)

    @model_validator(mode="after")
    def has_one_logprob_a_token(self) -> Self:
        if self.generation_logprobs is not None and len(self.generation_logprobs) != len(self.token_ids):
            raise ValueError(
                f"{len(self.generation_logprobs)} generation_logprobs for {len(self.token_ids)} token_ids: send as many"
            )
        return self


class Sampling(Strict):
    """How tokens are drawn. What a sample says of itself (stop strings, seed) comes before this."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """0 is greedy; otherwise at least 0.01, below which the engine would quietly sample at 0.01."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31)
    """0 or -1 keeps all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Per generation; without it only `max_seq_len` bounds a generation."""
    stop_strings: list[StopString] = []
    ignore_eos: bool = False
    """Generates on past the model's end token, so that every generation has `max_new_tokens`: for load tests."""
    greedy: bool = False
    """The most likely token each time, whatever `temperature` says."""
    seed: Seed | None = None
    """Makes the request repeatable: every generation draws from its own seed, derived from this one. What
    remains is the engine's rounding, which depends on what else is in its batch."""

    @field_validator("temperature")
    @classmethod
    def is_greedy_or_not_too_cold(cls, temperature: float) -> float:
        if 0 < temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"Input should be 0 (greedy) or at least {LOWEST_TEMPERATURE}")
        return temperature


class SampleInput(BaseModel):
    """One prompt with its task, as chat `messages` or as a `message_log` that already carries its tokens.

    Fields beyond these come back untouched on every sample made from this one.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    id: str | None = None
    """The caller's own name for the sample; it comes back."""
    idx: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Defaults to the sample's place in the request."""
    task_name: str
    messages: list[PromptMessage] | None = Field(default=None, min_length=1, max_length=2048)
    message_log: list[GivenMessage] | None = Field(default=None, min_length=1)
    extra_env_info: dict[str, JsonValue] = {}
    stop_strings: list[StopString] | None = None
    """In place of `sampling.stop_strings`; an empty list means none."""
    observation_format: ObservationFormat | None = None
    """In place of the request's."""
    tools: list[JsonObject] | None = None
    """Handed to the chat template, as JSON schemas of functions."""
    chat_template_kwargs: JsonObject | None = None
    """Handed to the chat template, for prompt and observations (`{"enable_thinking": false}`). In place of the
    request's."""
    seed: Seed | None = None
    """In place of what `sampling.seed` would give it; the rollouts of its group still differ."""

    @model_validator(mode="after")
    def has_one_prompt(self) -> Self:
        if self.messages is not None and self.message_log is not None:
            raise ValueError("messages and message_log are both given: send the one that is the prompt")
        if self.messages is None and self.message_log is None:
            raise ValueError("messages and message_log are both missing: send one of them as the prompt")
        return self


class Keep(Strict):
    """Enough is enough: what is still running then is cancelled."""

    groups: int | None = Field(default=None, ge=1)
    """The request is done when this many groups are full."""
    per_group: int | None = Field(default=None, ge=1)
    """A group is full when this many of its rollouts have ended without error; by default all of them."""


class PolicyDemand(Strict):
    """Which weights a rollout may begin with; while it runs, newer ones may come."""

    min_version: int | None = Field(default=None, ge=0)
    """The request waits until this version, or a newer one, is current."""
    version: int | None = Field(default=None, ge=0)
    """The request waits until just this version is current; when a newer one is, it is refused at once."""
    wait_s: float | None = Field(default=None, ge=0)
    """How long it waits at most before it is refused (409); without it, and at most, as long as the service allows."""


class RolloutRequest(Strict):
    samples: list[SampleInput] = Field(min_length=1)
    num_generations: int = Field(default=1, ge=1, le=1024)
    """Rollouts of each sample: one group."""
    sampling: Sampling = Sampling()
    max_seq_len: int | None = Field(default=None, ge=1)
    """Prompt, generations and observations together; without it the model's own limit."""
    max_rollout_turns: int = Field(default=16, ge=1)
    """Turns of one rollout, those that its `message_log` brought along included."""
    schedule: Literal["async", "lockstep"] = "async"
    """`async`: nothing waits for a slower sibling; `lockstep`: all generate, then all step."""
    observation_format: ObservationFormat | None = None
    """How observations become tokens: as the chat template of the model frames them or `raw`. By default `chat` for a
    sample that came as `messages` and `raw` for one that came as `message_log`. A sample's own comes before this."""
    chat_template_kwargs: JsonObject | None = None
    """For every sample that has none of its own."""
    deadline_s: float | None = Field(default=None, gt=0)
    """What still runs then comes back as `status: deadline` with its log so far, ready to be posted back."""
    on_error: Literal["return", "fail"] = "return"
    """`return`: a failed sample is data; `fail`: the first one ends the request."""
    retries: int = Field(default=3, ge=0, le=100)
    """How often calls of one sample are tried again after a failure of the fleet."""
    keep: Keep = Keep()
    policy: PolicyDemand = PolicyDemand()


class SampleError(Lenient):
    """Why a sample has no result: which boundary broke, a sentence, and whether posting it again can help."""

    kind: FailureKind
    message: str
    retryable: bool


class SampleMetrics(Lenient):
    turn_count: int
    total_tokens: int
    """Generated and environment tokens; the prompt's own are not counted."""
    assistant_tokens: int
    env_tokens: int
    terminated: bool
    truncated: bool
    max_turns_reached: bool
    total_reward: float | None
    turn_gen_tokens: list[int]
    turn_input_tokens: list[int] = []


class SampleResult(Lenient):
    """One rollout of one sample; its log holds what was reached, whatever the status."""

    id: str | None = None
    idx: int
    generation_index: int
    """Which rollout of its group, from 0."""
    task_name: str
    message_log: list[Message]
    total_reward: float | None
    """Sum of `rewards`; null for a sample that failed, which was worth neither nothing nor anything else."""
    rewards: dict[str, float]
    """Over all turns of this request, by name; a reward without a name is under `reward`."""
    status: SampleStatus
    """`completed`: its environment terminated it (also if its last observation did not fit); `truncated`: `max_seq_len`
    was reached; `max_turns`: the turn limit was; `deadline`, `cancelled`: cut off, with a log that can be posted back;
    `error`: see there."""
    error: SampleError | None = None
    terminated: bool
    truncated: bool
    max_turns_reached: bool
    extra_env_info: dict[str, JsonValue]
    """As the last environment step left it."""
    stop_strings: list[str] = []
    """Those of the next generation, had there been one."""
    observation_format: ObservationFormat = "raw"
    tools: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None
    answer: str | None = None
    """What the environment last read out of a response."""
    metrics: SampleMetrics


class PolicyVersions(Lenient):
    """The oldest and newest weights that made a token of the response; none if no token was made."""

    oldest: str | None = None
    newest: str | None = None
    current: str | None = None
    """What was current when the last sample had ended."""


RequestMetrics = dict[str, int | float | list[int]]
"""By the names of NeMo-RL's rollout module; the `histogram/...` ones are lists of lengths, one a generation."""


class RolloutSummary(Lenient):
    request_id: str
    metrics: RequestMetrics
    policy: PolicyVersions


class RolloutResponse(RolloutSummary):
    """`samples` in input order, the rollouts of one sample next to each other."""

    samples: list[SampleResult]


class TaskInfo(Lenient):
    task_name: str
    description: str
    fields: dict[str, JsonValue]
    """JSON schema of the task's `extra_env_info`."""
    example: SampleInput
    """A sample that can be posted as it is."""


class FieldProblem(Lenient):
    field: str
    message: str
    value: JsonValue = None


class Problem(Lenient):
    """An error of a whole request, as RFC 9457 has it (`application/problem+json`)."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[FieldProblem] = []
