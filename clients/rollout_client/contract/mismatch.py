"""The contract of `/rollouts/logprobs` and `/mismatch`: a trainer's log-probabilities beside the sampled ones.

Between two log-probabilities of one token, the ratio of the probabilities is `exp(|difference|)`: 1 if they agree. A
mean ratio counts no token as more than 10, so that a few tokens decide nothing; the share of those beyond is told too.
Log-probabilities are natural logarithms, times in seconds.
"""

from typing import Annotated, Literal

from pydantic import Field

from rollout_client.contract.base import LABEL, Lenient, Strict
from rollout_client.contract.messages import TokenId

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
