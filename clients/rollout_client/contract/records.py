"""The contract of rollouts that have ended: their records, trainers' log-probabilities beside them, and replays.

`/rollouts/{rollout_id}` has the record, `/rollouts/logprobs` and `/mismatch` the comparison with a trainer, `/replay`
generates the tokens again. Between two log-probabilities of one token, the ratio of the probabilities is
`exp(|difference|)`: 1 if they agree. A mean ratio counts no token as more than 10, so that a few tokens decide nothing;
the share of those beyond is told too. Log-probabilities are natural logarithms, times in seconds; moments (`..._at`)
are in seconds since 1970.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rollout_client.contract.base import LABEL, Lenient, Strict
from rollout_client.contract.messages import TokenId
from rollout_client.contract.origins import GenerationSpan
from rollout_client.contract.rollouts import SampleResult, SampleStatus

MOST_REPORTS = 65_536


class ReportedRollout(Strict):
    """A trainer's numbers of the rollout `rollout_id`."""

    rollout_id: str
    """The `rollout_id` of the result."""
    logprobs: list[float | None] = Field(max_length=2**24, fail_fast=True)
    """Log-probabilities at the temperature of the rollout: one for each generated token of `message_log`; or for each
    token after the prompt, for each but the first, or for each. Those of other tokens are not read, and may be null."""
    mask: list[bool] | None = Field(default=None, fail_fast=True)
    """Which of them the trainer has in its loss."""
    token_ids: list[TokenId] | None = Field(default=None, fail_fast=True)
    """The tokens of the whole log as the trainer has them, to be compared with the log's."""
    weight_version: Annotated[str, Field(pattern=LABEL)] | None = None
    """The version that the trainer has computed with; by default that of each token. Tokens of another version are
    counted, and are no finding."""
    start: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Index in the log's tokens of the token that the first of `logprobs` is for. They may then leave out the end of
    the log, such as what the trainer has cut: its tokens are not compared."""


class LogprobsReport(Strict):
    """The body of `POST /rollouts/logprobs`: the numbers of a training step."""

    reports: list[ReportedRollout] = Field(min_length=1, max_length=MOST_REPORTS, fail_fast=True)
    """One for each rollout."""


class RefusedReport(Lenient):
    """A rollout that was not compared."""

    rollout_id: str
    """The rollout."""
    message: str
    """Why it was not compared, as a sentence."""


class MismatchCause(Lenient):
    """A cause that the recent reports show."""

    kind: Literal["replica", "missing_mask", "other_tokens", "wrong_temperature", "wrong_version", "misaligned"]
    """`replica`: a generator replica computes other numbers than its siblings, and was taken out of service. The others
    are at the trainer: its mask, its token ids, its temperature, its weights, or which numbers belong to which
    tokens."""
    message: str
    """The cause, as a sentence that says what to look at."""
    replica: str | None = None
    """The replica."""
    last: float | None = None
    """When it was found last, in seconds since 1970."""


class ReportAnswer(Lenient):
    """The answer to a report."""

    compared: int
    """How many rollouts were compared."""
    mean_ratio: float
    """The mean ratio of their tokens, each 10 at most; at least 1."""
    share_beyond: float = 0.0
    """The share of the tokens whose ratio is beyond 10, from 0 to 1."""
    largest_ratio: float
    """The largest ratio of a token."""
    refused: list[RefusedReport] = []  # noqa: RUF012 - pydantic copies it
    """Those that were not."""
    causes: list[MismatchCause] = []  # noqa: RUF012 - pydantic copies it
    """The causes that this report shows, with those before it."""


class MismatchSums(Lenient):
    """The mismatch of some tokens."""

    tokens: int
    """How many they are."""
    mean_ratio: float
    """The mean ratio, of each token 10 at most; at least 1."""
    share_beyond: float = 0.0
    """The share of the tokens whose ratio is beyond 10, from 0 to 1."""
    largest_ratio: float
    """The largest ratio."""


class MismatchedRollout(MismatchSums):
    """A rollout whose numbers part from the trainer's."""

    rollout_id: str
    """The rollout; `GET /rollouts/{rollout_id}` has its tokens with both numbers."""


class Mismatch(MismatchSums):
    """The answer of `GET /mismatch`, of all reports since the store of the records has started."""

    rollouts: int
    """How many rollouts were compared."""
    by: dict[str, dict[str, MismatchSums]]
    """By attribute and value: `replica`, `version`, `policy`."""
    worst: list[MismatchedRollout]
    """The caller's own rollouts that part the most."""
    causes: list[MismatchCause]
    """The causes that were found, the latest first."""


class RolloutMismatch(MismatchSums):
    """A trainer's numbers of one rollout, in its record."""

    logprobs: list[float]
    """One for each token of `message_log` that was compared: of messages that may be trained and were sampled as the
    request says (no `sampled_with`); of fewer if the report said where it starts."""
    start: int = 0
    """How many such tokens come before the first of them."""
    weight_version: str | None = None
    """The version that the trainer has computed with, if it said so."""
    reported_at: float
    """When, in seconds since 1970."""


class RecordedGeneration(GenerationSpan):
    """One generation: where and how these tokens were made."""

    replica: str
    """Id of the generator replica; empty if it is not known."""
    cached_tokens: int = 0
    """How many tokens of its prompt the engine found in its prefix cache."""
    batch_size: int = 0
    """Generations that ran or waited in the engine when it ended, with this one; 0 if it is not known."""
    waited_s: float = 0.0
    """How long it waited for its turn."""
    took_s: float = 0.0
    """How long it took from its turn to its end."""
    began_at: float | None = None
    """When it began to wait; null if it is not known."""


class RecordedStep(Lenient):
    """A step of the environment."""

    turn: int
    """Number of the turn that it judged: of the generated messages of `message_log`, from 0."""
    began_at: float
    """When it began."""
    took_s: float
    """How long it took."""


class RecordedRetry(Lenient):
    """A call that was made again, or a whole rollout that was played anew."""

    at: float
    """When the call had failed."""
    kind: str
    """The boundary that broke, as `kind` of an `error`."""
    message: str
    """The failure, as a sentence."""


class RecordedState(Lenient):
    """The environment's state of a rollout from one turn on, until that of a later turn."""

    turn: int
    """Number of the first turn that was generated in it."""
    extra_env_info: dict[str, JsonValue]
    """The state for the step of this turn."""
    stop_strings: list[str] = []  # noqa: RUF012 - pydantic copies it
    """Those of its generation."""


class RolloutRecord(Lenient):
    """The answer of `GET /rollouts/{rollout_id}`."""

    rollout: SampleResult
    """The rollout, as its request returned it."""
    request_id: str
    """The request that played it."""
    group_id: str
    """The service's own name of its group."""
    policy: str | None = None
    """The named policy that played; null for the one without a name."""
    priority: str | None = None
    """The `priority` of its request; `other` for one that is a number."""
    began_at: float | None = None
    """When it began; null if it ended before."""
    ended_at: float
    """When it ended."""
    generations: list[RecordedGeneration] = []  # noqa: RUF012 - pydantic copies it
    """Its generations, in order; none of an agent's."""
    steps: list[RecordedStep] = []  # noqa: RUF012 - pydantic copies it
    """The steps of its environment, in order."""
    retries: list[RecordedRetry] = []  # noqa: RUF012 - pydantic copies it
    """Its last retries, in order, at most 64; also those that cost none of the request's `retries`."""
    states: list[RecordedState] = []  # noqa: RUF012 - pydantic copies it
    """The environment's states, in order, from the first turn that was played in this request on; a turn without one
    left it as it was."""
    restarts: int = 0
    """How often it was played anew from its prompt."""
    retries_used: int = 0
    """How many of the request's `retries` it used."""
    mismatch: RolloutMismatch | None = None
    """The numbers that a trainer has reported last."""


class RecordedRollout(Lenient):
    """A line of `GET /rollouts`."""

    rollout_id: str
    """The service's name of the rollout."""
    request_id: str
    """The request that played it."""
    task_name: str
    """The environment that played it."""
    status: SampleStatus
    """How it ended."""
    total_reward: float | None
    """Sum of its rewards; null for a failed rollout."""
    ended_at: float
    """When it ended."""
    mean_ratio: float | None = None
    """The mean ratio between a trainer's probabilities and the sampled ones, if a trainer has reported."""


class RecordedRollouts(Lenient):
    """The answer of `GET /rollouts`."""

    rollouts: list[RecordedRollout]
    """The newest first."""


ReplayVerdict = Literal["equal", "equal_ids", "not_compared", "parts"]


class ReplayRequest(Strict):
    """The body of `POST /replay`: one of `rollout` and `rollout_id`."""

    rollout: SampleResult | None = None
    """A result, as a request returned it or a file keeps it."""
    rollout_id: str | None = None
    """The `rollout_id` of one whose record the service keeps (`rollout_records` of its config)."""

    @model_validator(mode="after")
    def has_one_rollout(self) -> Self:
        if (self.rollout is None) == (self.rollout_id is None):
            raise ValueError("send one of rollout, a result, and rollout_id, that of a record")
        return self


class TokenDifference(Lenient):
    """The first place at which the replay differs, and the tokens of both there."""

    message: int
    """Index of the message in `message_log`."""
    token: int
    """Index of the token within the message."""
    recorded_id: int | None = None
    """The token of the log; null where the generation had ended there."""
    recorded_text: str | None = None
    """Its text."""
    recorded_logprob: float | None = None
    """Its log-probability, as the log has it."""
    replayed_id: int | None = None
    """The token of the replay; null where the generation has ended there."""
    replayed_text: str | None = None
    """Its text."""
    replayed_logprob: float | None = None
    """Its log-probability in the replay."""


class ReplayedGeneration(GenerationSpan):
    """Tokens that one version made in one generation."""

    weight_version: str | None = None
    """The version that made them, as `weight_versions` has it; null if the log does not say it."""
    verdict: ReplayVerdict
    """`equal`: the ids, and the log-probabilities within float rounding; `equal_ids`: the ids; `not_compared`: `reason`
    says why; `parts`: neither."""
    tokens: int = 0
    """Tokens of the log up to the first that differs."""
    largest_difference: float | None = None
    """The largest difference of two log-probabilities of one token, over these; null without one."""
    difference: TokenDifference | None = None
    """Where it differs first, in its ids, or else in its log-probabilities."""
    reason: str | None = None
    """Why they were not compared."""
    replica: str | None = None
    """The generator replica of the replay."""
    batch_size: int | None = None
    """Generations that the engine had when this one ended, with this one; null if it is not known."""


class ReplayResponse(Lenient):
    """The answer of `POST /replay`."""

    request_id: str
    """The request's `X-Request-ID`, or the id that the service gave it."""
    rollout_id: str | None = None
    """That of the rollout."""
    verdict: ReplayVerdict
    """The worst of its generations, in this order: `equal`, `equal_ids`, `not_compared`, `parts`."""
    tokens: int
    """Tokens of the log that were compared."""
    largest_difference: float | None = None
    """The largest difference of two log-probabilities of one token; null if none were compared."""
    difference: TokenDifference | None = None
    """That of the first generation which has the verdict."""
    generations: list[ReplayedGeneration]
    """One for each generation and version, in order."""
    notes: list[str] = []  # noqa: RUF012 - pydantic copies it
    """Sentences on what is not as it was: software, settings, other generations in the engine."""
