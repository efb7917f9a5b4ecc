"""The contract of `POST /rollout`: the types of its request and of its response.

Requests are strict: an unknown field is an error. The exception is a sample, which may carry further fields; they come
back untouched. Lengths are in tokens, times in seconds; log-probabilities are natural logarithms.

The docstrings under the fields are the descriptions in the service's OpenAPI document.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from rollout_client.contract.base import Lenient, Priority, RolloutDemand, Strict
from rollout_client.contract.messages import (
    MOST_TOOLS,
    Branch,
    GivenMessage,
    Include,
    JsonObject,
    Message,
    PromptMessage,
)
from rollout_client.contract.origins import Fork, ForkPoint, ReplayRecord
from rollout_client.contract.selection import GroupConditions, GroupCounts, NextSampleRange, Place, SampleRange

SampleStatus = Literal["completed", "truncated", "max_turns", "deadline", "cancelled", "stale", "error"]
FailureKind = Literal["request", "generation", "environment", "timeout", "overload", "policy", "internal"]
ObservationFormat = Literal["chat", "raw"]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
MOST_STOP_STRINGS = 128
"""The engine looks for each of them after every token."""
MOST_RANGES = 64
DRAWN_PER_GROUP = 8
"""Samples that `keep.where` draws at most for each group that it is to keep, unless `keep.draw_at_most` says more."""
AT_ONCE_PER_GROUP = 2
"""Groups that it plays at once, at most, for each that it is to keep."""
LOWEST_TEMPERATURE = 0.01
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Sampling(Strict):
    """How tokens are sampled. A sample's own `stop_strings` and `seed` take precedence over these."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """0 is greedy decoding; otherwise at least 0.01, because the engine samples at 0.01 for any lower value."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Samples from the most likely tokens whose probabilities sum to this; 1 keeps all tokens."""
    top_k: int = Field(default=0, ge=-1, lt=2**31)
    """Samples from this many of the most likely tokens; 0 or -1 keeps all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drops tokens less likely than this fraction of the most likely token's probability; 0 keeps all tokens."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Upper bound of one generation, in tokens; by default only `max_seq_len` bounds it."""
    stop_strings: list[StopString] = Field(default=[], max_length=MOST_STOP_STRINGS, fail_fast=True)
    """A generation ends after the first of these; the stop string stays in the output. There may be special tokens in
    it, also where the text of the output leaves them out."""
    ignore_eos: bool = False
    """Generates past the model's end token, so that every generation has `max_new_tokens`: for load tests."""
    greedy: bool = False
    """Greedy decoding, whatever `temperature` is."""
    seed: Seed | None = None
    """Makes the request repeatable: every generation has its own seed, derived from this one. Only rounding in the
    engine still differs, because it depends on what else is in the engine's batch."""

    @field_validator("temperature")
    @classmethod
    def is_greedy_or_not_too_cold(cls, temperature: float) -> float:
        if 0 < temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"Input should be 0 (greedy) or at least {LOWEST_TEMPERATURE}")
        return temperature


class SampleInput(BaseModel):
    """One prompt with its task: chat `messages`, a `message_log` that already carries its tokens, or a `fork`.

    Further fields come back untouched on every rollout of this sample. None may have the name of a field of the result.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)

    id: str | None = None
    """The caller's own name for the sample; it comes back."""
    idx: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """The caller's own number for the sample; by default its index in the request."""
    task_name: str
    """The environment that plays the sample, one of those that `GET /tasks` lists."""
    messages: list[PromptMessage] | None = Field(default=None, min_length=1, max_length=2048, fail_fast=True)
    """The prompt as chat messages, which the service renders with the model's chat template. It may be missing only
    where the task's environment makes the first messages itself."""
    message_log: list[GivenMessage] | None = Field(default=None, min_length=1, max_length=8192, fail_fast=True)
    """The prompt as messages with their tokens, taken as they are. A log that the service returned goes on from its
    last token."""
    branches: list[Branch] = []
    """Beside `message_log`: the logs that the rollout has left (`history: template`), the oldest first. They come back,
    and their turns count."""
    fork: Fork | None = None
    """The prompt as a part of a rollout that the service keeps a record of: it is played as if the part were posted as
    `message_log`. Fields that the sample does not have are those of the rollout at that point. Beside a `message_log`,
    without `turn` and `token`, it only names the rollout that the log was taken from."""
    extra_env_info: dict[str, JsonValue] = {}
    """Data of the sample for the environment; `GET /tasks` gives the JSON schema of each task."""
    stop_strings: list[StopString] | None = Field(default=None, max_length=MOST_STOP_STRINGS, fail_fast=True)
    """In place of `sampling.stop_strings`; an empty list means none."""
    observation_format: ObservationFormat | None = None
    """In place of the request's `observation_format`."""
    tools: list[JsonObject] | None = Field(default=None, max_length=MOST_TOOLS, fail_fast=True)
    """JSON schemas of functions, passed to the chat template; by default those of the task. An empty list: none."""
    chat_template_kwargs: JsonObject | None = None
    """Variables for the chat template, for prompt and observations, such as `{"enable_thinking": false}`. In place of
    the request's `chat_template_kwargs`."""
    seed: Seed | None = None
    """In place of the seed that is derived from `sampling.seed`; the rollouts of its group still differ."""

    @model_validator(mode="after")
    def has_one_prompt(self) -> Self:
        if self.messages is not None and (self.message_log is not None or self.fork is not None):
            other = "fork" if self.message_log is None else "message_log"
            raise ValueError(f"messages and {other} are both given: send the one that is the prompt")
        points = 0 if self.fork is None else (self.fork.turn is not None) + (self.fork.token is not None)
        if self.message_log is not None and points:
            raise ValueError(
                "message_log and a point of fork are both given: the log ends at it, leave out turn, token"
            )
        if self.message_log is None and self.fork is not None and points != 1:
            raise ValueError("fork needs turn or token: send one of them")
        return self


class Keep(Strict):
    """Early stopping: when this many rollouts are done, those that still run are cancelled.

    With `where`, groups that teach nothing are dropped and further samples are drawn in their place.
    """

    groups: int | None = Field(default=None, ge=1)
    """The request is done when this many groups are full; by default all of them. With `where`: when this many are
    kept, which are the first that pass in the order of their samples, however long each takes."""
    per_group: int | None = Field(default=None, ge=1)
    """A group is full when this many of its rollouts have ended without error; by default all of them."""
    where: GroupConditions | None = None
    """Conditions of a group that is kept. One that fails them, or is not full, is dropped: it is not in the answer, and
    the answer's `groups` counts it. Further samples are drawn from `samples_from`, ahead of the verdicts, or from
    `samples`."""
    draw_at_most: int | None = Field(default=None, ge=1)
    """With `where`: how many samples are drawn at most; then the answer has as many groups as were kept. After the
    samples of `samples_from` come those that `next_samples_from` would name, and so on. By default eight for each of
    `groups`, or all `samples`."""


class RolloutRequest(Strict):
    """The body of `POST /rollout`: samples, and how all of them are played."""

    samples: list[SampleInput] = []  # noqa: RUF012 - pydantic copies it
    """The prompts with their tasks."""
    samples_from: list[SampleRange] = Field(default=[], max_length=MOST_RANGES, fail_fast=True)
    """In place of `samples`: samples that the service has, one range after the other. The answer's `next_samples_from`
    is where the next ones begin."""
    next_start: Place | None = None
    """Ignored: a page of `GET /tasks/{task_name}/samples` has it, so that a page can be posted as it is."""
    num_generations: int = Field(default=1, ge=1, le=1024)
    """Rollouts of each sample: the size of a group."""
    sampling: Sampling = Sampling()
    """How tokens are sampled."""
    max_seq_len: int | None = Field(default=None, ge=1)
    """Bound of prompt, generations and observations together, in tokens; by default the model's own limit."""
    max_rollout_turns: int = Field(default=16, ge=1)
    """Most turns of one rollout, including those in the posted `message_log`."""
    schedule: Literal["async", "lockstep"] = "async"
    """`async`: each rollout runs on its own; `lockstep`: all generate, then all step."""
    observation_format: ObservationFormat | None = None
    """How observations become tokens. `chat`: framed by the model's chat template; `raw`: their text alone. By default
    `chat` for a sample with `messages` and `raw` for one with `message_log`."""
    history: Literal["append", "template"] = "append"
    """How the prompt of a later turn is made. `append`: what was observed is appended to the log, so earlier responses
    stay whole. `template`: the chat template renders all messages again, and may drop the thoughts of earlier turns.
    Where that changes the log, beyond white space and ends of turns, the log so far becomes one of `branches`, and the
    rollout goes on with the rendering, in which earlier responses are part of the prompt. Needs `observation_format:
    chat`."""
    chat_template_kwargs: JsonObject | None = None
    """Variables for the chat template, for every sample that has none of its own."""
    deadline_s: float | None = Field(default=None, gt=0)
    """After this many seconds, rollouts that still run come back with `status: deadline` and their log so far, which
    can be posted again. Time in which a job or a request with an `Idempotency-Key` waits for another ingress replica
    does not count."""
    on_error: Literal["return", "fail"] = "return"
    """`return`: a failed rollout is data among the others; `fail`: the first failure ends the request."""
    retries: int = Field(default=3, ge=0, le=100)
    """How often the calls of one rollout are repeated after failures of the fleet, such as a lost replica."""
    keep: Keep = Keep()
    """Early stopping; by default every rollout is played to its end."""
    policy: RolloutDemand = RolloutDemand()
    """Which weights may generate; by default those that are current at the time."""
    include: Include = []  # noqa: RUF012 - pydantic copies it
    """Further numbers of each token, which come back on the messages: `routed_experts` (of a mixture of experts),
    `top_logprobs:N`, `sampling_mask`, `entropy`. Nothing is computed or sent that is not asked for."""
    priority: Priority = "train"
    """The share of the engines that the request gets while others wait too. A number is in proportion to a `train`
    request: one of 2 gets twice its tokens. `train` is 1, `interactive` 16, `batch` a sixteenth."""

    @model_validator(mode="after")
    def has_samples_of_one_kind(self) -> Self:
        if not (self.samples or self.samples_from):
            raise ValueError("samples and samples_from are both missing: send one of them, with at least one sample")
        if self.samples and self.samples_from:
            raise ValueError("samples and samples_from are both given: send one of them")
        if self.samples_from and not any(given.size for given in self.samples_from):
            raise ValueError("samples_from leaves every place out: nothing is left to play")
        return self

    @property
    def sample_count(self) -> int:
        """How many samples it asks for, also before those of `samples_from` are there; with `keep.where`, at most."""
        if self.samples_from and self.keep.where is not None:
            return self.keep.draw_at_most or DRAWN_PER_GROUP * (self.keep.groups or 1)
        return len(self.samples) or sum(given.size for given in self.samples_from)

    @property
    def groups_at_once(self) -> int:
        """How many groups are played at once, at most."""
        if self.keep.where is None:
            return self.sample_count
        return min(self.sample_count, AT_ONCE_PER_GROUP * (self.keep.groups or 1))


class SampleError(Lenient):
    """Why a rollout failed."""

    kind: FailureKind
    """The boundary that broke."""
    message: str
    """The failure, as a sentence."""
    retryable: bool
    """Whether posting the sample again can help."""


class SampleMetrics(Lenient):
    """The metrics of one rollout, for its turns in this request. Lengths are in tokens; the prompt is not counted."""

    turn_count: int
    """Number of generations."""
    total_tokens: int
    """Generated and environment tokens; not the prompt's."""
    assistant_tokens: int
    """Generated tokens."""
    env_tokens: int
    """Tokens of observations."""
    terminated: bool
    """Whether the environment ended the rollout."""
    truncated: bool
    """Whether `max_seq_len` was reached."""
    max_turns_reached: bool
    """Whether `max_rollout_turns` ended the rollout."""
    total_reward: float | None
    """Sum of all rewards; null for a failed rollout."""
    turn_gen_tokens: list[int]
    """Length of each generation."""
    turn_input_tokens: list[int] = []  # noqa: RUF012 - pydantic copies it
    """Length of the input of each generation, the prompt included."""
    parse_errors: int = 0
    """Number of generations with a `parse_error`."""
    clipped_turns: int = 0
    """Number of generations that were cut by their length: `finish_reason: length`."""
    environment: dict[str, float] = {}  # noqa: RUF012 - pydantic copies it
    """Metrics of the environment's own, by name: sums over its steps in this request."""


class SampleResult(Lenient):
    """One rollout of one sample; its log holds what was reached, whatever the status."""

    id: str | None = None
    """The sample's own `id`."""
    idx: int
    """The sample's own `idx`, by default its index in the request."""
    generation_index: int
    """Index of the rollout within its group, from 0."""
    task_name: str
    """The environment that played the rollout."""
    message_log: list[Message]
    """Prompt, responses and observations, with their tokens."""
    total_reward: float | None
    """Sum of `rewards`; null for a failed rollout: its reward is unknown, not zero."""
    rewards: dict[str, float]
    """Sums over all turns of this request, by name; a reward without a name is under `reward`."""
    status: SampleStatus
    """`completed`: the environment ended the rollout (also if its last observation did not fit); `truncated`:
    `max_seq_len` was reached; `max_turns`: `max_rollout_turns` was reached; `deadline`, `cancelled`: cut off, with a
    log that can be posted again; `stale`: cut off by `policy.max_staleness`; `error`: failed, `error` says why."""
    error: SampleError | None = None
    """Why the rollout failed."""
    terminated: bool
    """Whether the environment ended the rollout."""
    truncated: bool
    """Whether `max_seq_len` was reached."""
    max_turns_reached: bool
    """Whether `max_rollout_turns` ended the rollout."""
    extra_env_info: dict[str, JsonValue]
    """The sample's `extra_env_info` after the last environment step."""
    stop_strings: list[str] = []  # noqa: RUF012 - pydantic copies it
    """The stop strings that a further generation would have."""
    observation_format: ObservationFormat = "raw"
    """How observations became tokens."""
    tools: list[JsonObject] | None = None
    """The `tools` that the chat template was given: the sample's own, else those of its task."""
    chat_template_kwargs: JsonObject | None = None
    """The variables that the chat template was given."""
    answer: str | None = None
    """The answer that the environment last extracted from a response."""
    branches: list[Branch] = []  # noqa: RUF012 - pydantic copies it
    """The other conversations of a task that an agent plays, or the logs that a rollout with `history: template` has
    left. `message_log` has the one whose last response was generated last; all of them share `rewards`, unless they
    have their own. Of a game, `message_log` is that of the first seat of the policy, and each further seat is a branch
    with its own rewards."""
    metrics: SampleMetrics
    """Turns, lengths and reward of the rollout."""
    rollout_id: str | None = None
    """The service's own name of the rollout, unique among all requests."""
    replay: ReplayRecord | None = None
    """Numbers by which its tokens can be generated again; null for one that an agent has played."""
    parent: str | None = None
    """The `rollout_id` of the rollout that it was forked from."""
    forked_at: ForkPoint | None = None
    """Where it was forked; its log begins with the tokens of `parent` up to there."""


class PolicyVersions(Lenient):
    """The versions of the weights that generated the tokens of a response, as `weight_versions` names them.

    They are those of the policy that the request names. A posted message log may hold tokens of others.
    """

    oldest: str | None = None
    """The oldest of them; null if no token was generated."""
    newest: str | None = None
    """The newest of them; null if no token was generated."""
    current: str | None = None
    """The version that was current when the last rollout ended."""


RequestMetrics = dict[str, int | float | list[int] | dict[str, int]]
"""By the names of NeMo-RL's rollout module; each `histogram/...` is a list of lengths, one per generation. Besides,
each reward that its environment named has `rewards/NAME/{mean,max,min,median,stddev}`, over the rollouts that have it,
and each metric of the environment's own `environment/NAME/...` likewise. `histogram/staleness` has one number per
rollout: how many versions its oldest token was behind the current one at its end. `stale_rate` is the share that
`policy.max_staleness` cut off, of those that ended by themselves or by it. `per_worker_token_counts` has by the id of a
generator replica how many tokens it generated; it is absent where no replica is known, and tokens of agents' calls are
not in it. `docs/concepts.md` lists all of them."""


class RolloutSummary(Lenient):
    """The part of a response that is about the request as a whole."""

    request_id: str
    """The request's `X-Request-ID`, or the id that the service gave it."""
    metrics: RequestMetrics
    """Aggregates over the rollouts that were played to their end, by NeMo-RL's names. `clipped_ratio` is the share of
    responses that their length has cut (`finish_reason: length`); `truncation_rate` that of rollouts which reached
    `max_seq_len`. `total_tokens_per_sample/...` and `mean_total_tokens_per_sample` leave out the prompt;
    `histogram/total_tokens_length`, which has a number for each generation, has it in."""
    policy: PolicyVersions
    """Which weights generated the tokens."""
    next_samples_from: list[NextSampleRange] = []  # noqa: RUF012 - pydantic copies it
    """The `samples_from` of the request, moved on to the samples that follow. With `keep.where`: that follow the last
    one that was drawn."""
    groups: GroupCounts | None = None
    """With `keep.where`: how many groups were drawn and kept, and why others were dropped. `metrics` are over all of
    `drawn`."""
    certificates: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    """The hash of the certificate of each task whose config names one (`rollout env certify`)."""


class RolloutResponse(RolloutSummary):
    """The answer of `POST /rollout`."""

    samples: list[SampleResult]
    """One per rollout, in input order; the rollouts of one sample are adjacent. With `keep.where` those of the groups
    that were kept."""
