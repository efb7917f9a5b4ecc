"""The contract of `POST /replay`: the tokens of a rollout generated again, and whether they are equal.

Log-probabilities are natural logarithms.
"""

from typing import Literal, Self

from pydantic import model_validator

from rollout_client.contract.base import Lenient, Strict
from rollout_client.contract.rollouts import SampleResult

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


class ReplayedGeneration(Lenient):
    """Tokens `[start, end)` of the message at index `message`, which one version made in one generation."""

    message: int
    """Index of the message in `message_log`."""
    start: int
    """Index of the first token within the message."""
    end: int
    """Index after the last token."""
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
