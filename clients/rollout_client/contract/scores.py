"""The contract of `POST /score`: the log-probabilities of given token ids under the service's weights.

They are those of temperature 1, without top-p, top-k and min-p: what the policy says of each token, given the tokens
before it. Log-probabilities are natural logarithms.
"""

from typing import Annotated

from pydantic import Field

from rollout_client.contract.base import Lenient, PolicyDemand, Priority, Strict
from rollout_client.contract.messages import TokenId
from rollout_client.contract.rollouts import PolicyVersions, SampleError

MOST_TOP_K = 20
"""vLLM's default of `max_logprobs`."""
TokenSequence = Annotated[list[TokenId], Field(min_length=2, fail_fast=True)]
Start = Annotated[int, Field(ge=0)]


class ScoreRequest(Strict):
    """The body of `POST /score`."""

    sequences: list[TokenSequence] = Field(min_length=1, fail_fast=True)
    """The token ids of each sequence, at least two, because nothing comes before the first, and at most as many as the
    model takes; with `top_k` one less."""
    top_k: int = Field(default=0, ge=0, le=MOST_TOP_K)
    """For each position the ids and log-probabilities of this many of the most likely tokens come back too."""
    start: Start | Annotated[list[Start], Field(fail_fast=True)] = 0
    """The first position whose log-probability is asked for, from 0; one number for all sequences, or one for each."""
    policy: PolicyDemand = PolicyDemand()
    """Under which weights; by default the current ones. With `version` every sequence is scored by exactly that one,
    or the request is refused (409)."""
    priority: Priority = "train"
    """The share of the engines that the request gets while others wait too, as in `POST /rollout`."""
    retries: int = Field(default=3, ge=0, le=100)
    """How often the scoring of one sequence is repeated after failures of the fleet, such as a lost replica."""


class SequenceScore(Lenient):
    """The score of one sequence."""

    logprobs: list[float | None] | None
    """The log-probability of each token from `start` on; null for the first token of the sequence, which nothing comes
    before. Null as a whole if the scoring failed."""
    top_token_ids: list[list[int] | None] | None = None
    """With `top_k`: the most likely tokens of each of these positions, the most likely first."""
    top_logprobs: list[list[float] | None] | None = None
    """With `top_k`: the log-probabilities of `top_token_ids`."""
    weight_version: str | None
    """The version of the weights, as `weight_versions` names it; one version scores all tokens of a sequence."""
    error: SampleError | None = None
    """Why the scoring failed."""


class ScoreResponse(Lenient):
    """The answer of `POST /score`."""

    request_id: str
    """The request's `X-Request-ID`, or the id that the service gave it."""
    policy: PolicyVersions
    """Which weights scored the sequences."""
    scores: list[SequenceScore]
    """One per sequence, in input order."""
