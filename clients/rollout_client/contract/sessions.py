"""The contract of `/sessions`: agents that bring their own loop, recorded exactly.

A session gives a program an address that speaks OpenAI's and Anthropic's APIs. The service records every call of the
engine under it: prompt ids, generated ids, log-probabilities and weight versions, whatever the program asks for.
Lengths are in tokens, times in seconds; log-probabilities are natural logarithms.

A record is a forest. A call whose conversation goes on from what the session has generated continues that branch with
the engine's own ids; a conversation that was edited, compacted, cut or repeated starts another branch. No generated
token is recorded twice.

`ModelServerCall` and `ModelServerAnswer` are the bodies of those APIs, with or without a session, as far as OpenAPI
shows them. Their fields are those of OpenAI's and Anthropic's references; the official clients have types for all of
them.
"""

from datetime import datetime
from math import isfinite
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout_client.contract.base import Lenient, Priority, RolloutDemand, Strict
from rollout_client.contract.messages import Include
from rollout_client.contract.rollouts import PolicyVersions, SampleInput, SampleResult, Sampling


class ModelServerCall(BaseModel):
    """A body of OpenAI's or Anthropic's API. Its fields are those that vLLM's server of the same route takes."""

    model_config = ConfigDict(extra="allow")


class ModelServerAnswer(BaseModel):
    """An answer of OpenAI's or Anthropic's API, or an error in its form, as vLLM's server gives them."""

    model_config = ConfigDict(extra="allow")


MOST_CALLS = 10_000
MOST_TOKENS = 2**26
LONGEST_IDLE_S = 86_400.0
LONGEST_GENERATION_ID = 256
MOST_REWARD_PARTS = 64
RewardName = Annotated[str, Field(min_length=1, max_length=128)]
SessionStatus = Literal["open", "ended", "deadline", "expired"]
DriftAction = Literal["generated_ids", "new_branch", "rendered_anew"]


class SessionLimits(Strict):
    """Bounds of one session. A call that would begin beyond one of them is refused (429); the record stays."""

    max_calls: int = Field(default=1000, ge=1, le=MOST_CALLS)
    """Calls of the engine that may be recorded."""
    max_tokens: int = Field(default=2**22, ge=1, le=MOST_TOKENS)
    """Tokens that the record may hold, prompts and responses together, each counted once however many branches share
    it. A call that has begun below the bound is recorded whole."""
    max_calls_in_flight: int = Field(default=64, ge=1, le=1024)
    """Calls that may run at the same time."""
    idle_s: float = Field(default=600.0, gt=0, le=LONGEST_IDLE_S)
    """Seconds without a call, a reward or a reading after which the session expires and its record is dropped. One
    with a call in flight never expires by this. The service may drop the session that is idle for the longest time
    before that, when its records together are beyond their bound in bytes."""


class SessionRequest(Strict):
    """The body of `POST /sessions`."""

    sample: SampleInput | None = None
    """The sample that the session plays: its `task_name` names the environment that can judge it (`judge` of a reward).
    Its further fields come back with every branch; none may be named as a field of `SessionSample` (422). Its prompt
    may be missing: the program writes it. By default a session without a task, whose rewards are numbers of
    `POST /sessions/{id}/reward` alone."""
    generation_index: int = Field(default=0, ge=0, lt=2**31)
    """Index of the rollout in its group, from 0."""
    sampling: Sampling = Sampling()
    """How tokens are sampled where a call does not say. A field that a call gives takes precedence."""
    include: Include = []  # noqa: RUF012 - pydantic copies it
    """Further numbers of each token, which are recorded and come back on the messages of the samples, as those of
    `POST /rollout` do. A call whose own sampling leaves no place for them is refused (400)."""
    policy: RolloutDemand = RolloutDemand()
    """Which weights may generate; by default those that are current at the time of each call. With `max_staleness` a
    call is refused (409) whose conversation has tokens that are more versions behind than that; one that runs while
    newer weights are pushed is not cut off unless the push interrupts it."""
    priority: Priority = "train"
    """The share of the engines that the session's calls get while others wait too."""
    limits: SessionLimits = SessionLimits()
    """Bounds of the session; the service's own bounds hold besides."""
    deadline_s: float | None = Field(default=None, gt=0)
    """After this many seconds calls in flight are aborted and further ones refused; the record stays readable until the
    session expires. By default none."""


class SessionInfo(Lenient):
    """A session as `POST /sessions` and `GET /sessions/{id}` answer it."""

    id: str
    """The name of the session."""
    base_url: str
    """Under it are `/v1/chat/completions`, `/v1/responses`, `/v1/messages`, `/v1/models` and `/tokenize`. OpenAI's
    clients take it with `/v1` at its end, Anthropic's without."""
    api_key: str | None = None
    """The key of this session alone, as `Authorization: Bearer` or `x-api-key`. Only the answer of `POST /sessions` has
    it."""
    status: SessionStatus
    """`open`: it takes calls; `ended`: by `DELETE` or its environment; `deadline`: its `deadline_s` is over; `expired`:
    it was dropped, and its record with it."""
    calls: int = 0
    """Calls of the engine that are recorded or in flight."""
    calls_in_flight: int = 0
    """Those of them that have not ended."""
    branches: int = 0
    """Conversations that were recorded: `GET /sessions/{id}/samples` has as many samples."""
    generated_tokens: int = 0
    """Tokens that the engine has generated, each counted once."""
    total_tokens: int = 0
    """Tokens of the record, each counted once."""
    record_bytes: int = 0
    """The record's share of the service's bound, in bytes, about."""
    expires_at: datetime | None = None
    """When it expires unless something is asked of it before; null while a call is in flight."""


class SessionReward(Strict):
    """The body of `POST /sessions/{id}/reward`. Giving it again for the same target replaces what was given."""

    reward: float | None = None
    """The reward. In samples it is named `reward`."""
    rewards: dict[RewardName, float] = Field(default={}, max_length=MOST_REWARD_PARTS)
    """In its place: named parts, whose sum is the reward."""
    judge: bool = False
    """In its place: the environment of the session's task judges the conversation that ends with the message, as the
    last response of a rollout, with the `extra_env_info` of the session's sample. Its reward is the reward."""
    generation_id: str | None = Field(default=None, min_length=1, max_length=LONGEST_GENERATION_ID)
    """The generated message that is rewarded, by the `id` of its answer; of an answer with several choices
    `{id}-{index}`. The reward counts for every branch that holds the message. By default it is the reward of the whole
    session, which every branch shares; with `judge` that of its last message."""

    @model_validator(mode="after")
    def has_one_form(self) -> Self:
        if (self.reward is not None) + bool(self.rewards) + self.judge != 1:
            raise ValueError("send one of reward, rewards and judge")
        if not isfinite(sum(self.parts.values())):
            raise ValueError("the sum of the rewards is larger than a number can be")
        return self

    @property
    def parts(self) -> dict[str, float]:
        """The reward by names."""
        return self.rewards if self.reward is None else {"reward": self.reward}


class SessionSample(SampleResult):
    """One branch of a session as a rollout: a conversation from its first message to its last response.

    Messages with `generation_logprobs` were generated; the tokens of all others are masked out of a loss. Branches
    share their beginnings, so that a generated message can be in several samples: `shared_messages` says where.
    """

    session_id: str
    """The session that it is a branch of."""
    branch: str
    """The id of its last generated message."""
    generation_ids: list[str]
    """The ids of its generated messages, in their order."""
    shared_messages: list[int] = []  # noqa: RUF012 - pydantic copies it
    """Indexes in `message_log` of generated messages that an earlier sample of the session has too. A loss over all
    samples that must count each token once leaves them out."""


class SessionSamples(Lenient):
    """The answer of `GET /sessions/{id}/samples`."""

    session_id: str
    """The session."""
    status: SessionStatus
    """Whether more can follow."""
    samples: list[SessionSample]
    """One per branch, in the order in which their last messages were generated."""
    policy: PolicyVersions = PolicyVersions()
    """Which weights generated the tokens."""


class MessageDrift(Lenient):
    """A message that a call sent otherwise than the session has it."""

    message: int
    """Its index in the call's messages."""
    role: str
    """Who speaks."""
    action: DriftAction
    """The session's reaction. `generated_ids`: it is a generated message in another form, and the engine's own ids were
    used. `new_branch`: it is not what the session has at this place, so that the call starts a branch here.
    `rendered_anew`: an assistant message that the session has not generated at this place, so that its text was
    tokenized."""
    fields: list[str] = []  # noqa: RUF012 - pydantic copies it
    """With `generated_ids`: the fields that differ, of `content`, `reasoning_content` and `tool_calls`."""


class CallDrift(Lenient):
    """The differences of one call. A generated message is compared by the calls that continue it."""

    generation_ids: list[str]
    """The messages that the call generated."""
    messages: list[MessageDrift]
    """In the order of the call's messages."""


class DriftReport(Lenient):
    """The answer of `GET /sessions/{id}/drift`."""

    session_id: str
    """The session."""
    calls: int
    """Calls that were recorded."""
    drift: list[CallDrift]
    """The calls that sent something otherwise, in their order."""
    counts: dict[DriftAction, int]
    """How often what was done."""


class SessionList(Lenient):
    """The answer of `GET /sessions`."""

    sessions: list[SessionInfo]
    """Those of the caller's key, oldest first."""
