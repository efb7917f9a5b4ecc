"""Scores a sample of the generations that replicas return on another replica, while rollouts go on.

Guarantees: at most one generation is being scored at a time; a check that fails costs no rollout anything; a replica is
taken out of service only if it differs from at least two others.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from ray.serve import metrics

from deployments.failures import RolloutFailure
from deployments.protocols.generation import (
    Generation,
    GenerationRequest,
    SamplingOptions,
    ScoredPrompt,
    ScoringRequest,
)
from service.canary.mismatch import Comparison, MismatchHistory, comparison_of
from service.settings import CanarySettings

PLAIN_SAMPLING = SamplingOptions()
logger = logging.getLogger("rollout_service.canary")


class ComparedReplicas(ABC):
    """The generator replicas, as the canary calls them."""

    @abstractmethod
    def replicas(self) -> Sequence[str]:
        """Those that run, by their ids."""

    @abstractmethod
    async def score_on(self, replica: str, request: ScoringRequest) -> Generation:
        """Scores on this replica, in a place that nothing else needs. Raises `RolloutFailure`."""

    @abstractmethod
    def take_out_of_service(self, replica: str, reason: str) -> None:
        """Lets the replica refuse generations and be replaced. Its result is not waited for."""


class BackgroundCanary:
    """The canary of one ingress replica."""

    def __init__(self, settings: CanarySettings, replicas: ComparedReplicas, random: Random | None = None) -> None:
        self._settings = settings
        self._replicas = replicas
        self._draw = (random or Random()).random
        self._choose = (random or Random()).choice
        self._history = MismatchHistory(settings.most_mean_ratio)
        self._check: asyncio.Task[None] | None = None
        # Serve adds the ingress replica's id; `generator` is the replica that generated.
        self._mean_ratio = metrics.Gauge(
            "rollout_canary_mean_ratio",
            description="Mean ratio between two replicas' probabilities of the last check's tokens, each 10 at most.",
            tag_keys=("generator",),
        )
        self._share_beyond = metrics.Gauge(
            "rollout_canary_share_beyond",
            description="Share of the tokens of that check whose ratio is beyond 10.",
            tag_keys=("generator",),
        )
        self._largest_ratio = metrics.Gauge(
            "rollout_canary_largest_ratio",
            description="Largest ratio between two replicas' probabilities of a token, of the last check.",
            tag_keys=("generator",),
        )
        self._apart = metrics.Counter(
            "rollout_canary_mismatches",
            description="Checks in which two generator replicas differed.",
            tag_keys=("generator",),
        )

    def note(self, request: GenerationRequest, generation: Generation, replica: str) -> None:
        """A replica has returned a generation. Checks it if it is drawn, and no other one is being checked."""
        if self._draw() >= self._settings.rate or (self._check is not None and not self._check.done()):
            return
        others = [name for name in self._replicas.replicas() if name != replica]
        if others and can_be_scored(request, generation, self._settings.most_tokens):
            self._check = asyncio.create_task(self._compare(request, generation, replica, self._choose(others)))

    async def _compare(self, request: GenerationRequest, generation: Generation, replica: str, other: str) -> None:
        try:
            scored = await self._replicas.score_on(other, scoring_of(request, generation))
        except RolloutFailure as failure:
            logger.info("A generation was not checked: %s", failure, extra={"replica_id": replica})
            return
        [span] = generation.weight_versions
        if isinstance(scored, ScoredPrompt) and scored.weight_version == span.version:
            self._record(comparison_of(replica, other, generation.logprobs, scored.prompt_logprobs))

    def _record(self, comparison: Comparison) -> None:
        tags = {"generator": comparison.generated_by}
        self._mean_ratio.set(comparison.sums.mean_ratio, tags)
        self._share_beyond.set(comparison.sums.share_beyond, tags)
        self._largest_ratio.set(comparison.sums.largest_ratio, tags)
        self._history.keep_only([*self._replicas.replicas(), comparison.generated_by, comparison.scored_by])
        if self._history.record(comparison):
            self._apart.inc(tags=tags)
            logger.warning(
                "Two generator replicas with the same weights differ: the probabilities of a token by a factor of %.3g "
                "on average, and of %.3g at most. The other replica is %s.",
                comparison.sums.mean_ratio,
                comparison.sums.largest_ratio,
                comparison.scored_by,
                extra={"replica_id": comparison.generated_by},
            )
        if (faulty := self._history.at_fault()) is not None:
            self._history.forget(faulty)
            reason = "its log-probabilities differ from those of at least two other replicas with the same weights"
            logger.error("A generator replica is taken out of service: %s.", reason, extra={"replica_id": faulty})
            self._replicas.take_out_of_service(faulty, reason)


def can_be_scored(request: GenerationRequest, generation: Generation, most_tokens: int) -> bool:
    """Whether a score gives the same log-probabilities: plain sampling, and the weights of one version."""
    if isinstance(request, ScoringRequest) or not generation.token_ids or len(generation.weight_versions) != 1:
        return False
    if len(request.prompt_token_ids) + len(generation.token_ids) > most_tokens:
        return False
    sampling = request.sampling
    return replace(sampling, ignore_eos=False, seed=None) == PLAIN_SAMPLING


def scoring_of(request: GenerationRequest, generation: Generation) -> ScoringRequest:
    scoring = scoring_request(request.generation_id, request.prompt_token_ids, generation.token_ids, request.policy)
    return replace(
        scoring,
        request_id=request.request_id,
        token_timeout_s=request.token_timeout_s,
    )


def scoring_request(name: str, prompt: Sequence[int], tokens: Sequence[int], policy: str | None) -> ScoringRequest:
    """Asks for the log-probabilities of `tokens` behind the prompt. `name` is that of what is compared."""
    generation_id = f"canary-{name}"
    return ScoringRequest(
        generation_id=generation_id,
        prompt_token_ids=[*prompt, *tokens],
        max_new_tokens=1,
        stop_strings=(),
        sampling=PLAIN_SAMPLING,
        rollout_id=generation_id,
        group=generation_id,
        policy=policy,
        start=len(prompt),
    )
