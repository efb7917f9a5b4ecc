"""Scores the sequences of `POST /score` over the `Generator` port, as generations of one token each.

Guarantees: each sequence is scored exactly once by one version of the weights, or has the failure that broke it; the
sequences share the engines with the generations of all other requests; cancelling a request cancels all its calls.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from deployments.failures import RolloutFailure, failure_of
from deployments.policy.failures import PolicyNotCurrent
from deployments.protocols.generation import (
    Generator,
    GeneratorDescription,
    RequestShare,
    SamplingOptions,
    ScoredPrompt,
    ScoringRequest,
)
from rollout_client.contract.base import label_of, read_label
from rollout_client.contract.problems import FieldProblem
from rollout_client.contract.rollouts import PolicyVersions, SampleError
from service.access.keys import ANYBODY, Caller
from service.remote.policy import RemotePolicy
from service.rollouts.metrics import policy_versions
from service.rollouts.retries import with_retries
from service.rollouts.staleness import refuse_dropped
from service.scheduling.priority import share_of
from service.scoring.parsing import ParsedScoreRequest, ScoreBounds, SequenceToScore
from service.settings import RequestLimits

MOST_AT_ONCE = 2048
"""Sequences of one request that wait or run: more than the engines of a large service run at once."""
logger = logging.getLogger("rollout_service.scoring")
Score = ScoredPrompt | SampleError
OnScore = Callable[[int, Score], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SequenceIdentity:
    """Which sequence of which request is scored."""

    request_id: str
    rollout_id: str
    position: int

    def log_fields(self) -> dict[str, Any]:
        return {"request_id": self.request_id, "rollout_id": self.rollout_id, "sample": self.position}


@dataclass(slots=True)
class SequenceRetries:
    """The retries that are left to one sequence."""

    identity: SequenceIdentity
    left: int

    def take_retry(self) -> bool:
        self.left -= 1
        return self.left >= 0


@dataclass(frozen=True, slots=True)
class ScoringParty:
    """As what the sequences of one request are scored."""

    request_id: str
    share: RequestShare
    min_weight_version: int
    policy: str | None
    """The named policy that scores."""
    generator: Generator


class Scoring:
    """
    Args:
        generator_for: what scores the sequences of a caller's request.
        describe: what the engines accept.
    """

    def __init__(
        self,
        generator_for: Callable[[Caller], Generator],
        policy: RemotePolicy,
        limits: RequestLimits,
        describe: Callable[[], GeneratorDescription],
    ) -> None:
        self._generator_for = generator_for
        self._policy = policy
        self._limits = limits
        self._describe = describe

    @property
    def bounds(self) -> ScoreBounds:
        """What one request may ask for."""
        engine = self._describe()
        return ScoreBounds(self._limits.max_rollouts_per_request, engine.max_model_len, engine.vocab_size)

    async def score(
        self, request: ParsedScoreRequest, request_id: str, on_score: OnScore, caller: Caller = ANYBODY
    ) -> PolicyVersions:
        """Waits for the weights that the request demands, and scores its sequences.

        Args:
            on_score: is awaited for each sequence with its position, once it is scored or has failed.
            caller: who sent the request.

        Returns:
            The versions that scored them.

        Raises:
            PolicyNotCurrent: the weights that it demands are not current, or were replaced meanwhile.
            PolicyUnknown: it names a policy that does not exist.
            PolicyStoreLost: the policy store does not answer.
        """
        options = request.options
        demanded = options.policy
        await self._policy.wait_for_version(demanded)
        party = ScoringParty(
            request_id,
            share_of(f"{request_id}-{uuid4().hex[:16]}", options.priority, caller),
            max(demanded.min_version or 0, demanded.version or 0),
            demanded.name,
            self._generator_for(caller),
        )
        versions: set[int] = set()
        waiting = iter(enumerate(request.sequences))

        async def score_next(sequences: Iterator[tuple[int, SequenceToScore]]) -> None:
            for position, sequence in sequences:
                score = await self._score_of(request, party, position, sequence)
                if isinstance(score, ScoredPrompt):
                    scored_by = read_label(score.weight_version).number
                    versions.add(scored_by)
                    refuse_other_version(demanded.name, demanded.version, scored_by)
                await on_score(position, score)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(MOST_AT_ONCE, len(request.sequences))):
                    group.create_task(score_next(waiting))
        except ExceptionGroup as group:
            if (refused := group.subgroup(PolicyNotCurrent)) is not None:
                raise refused.exceptions[0] from None
            raise
        return policy_versions(demanded.name, versions, self._policy.current(demanded.name))

    async def _score_of(
        self, request: ParsedScoreRequest, party: ScoringParty, position: int, sequence: SequenceToScore
    ) -> Score:
        """The score of one sequence, or why there is none."""
        rollout_id = f"{party.share.id}-{position}"
        asked = ScoringRequest(
            generation_id=rollout_id,
            prompt_token_ids=sequence.token_ids,
            max_new_tokens=1,
            stop_strings=(),
            sampling=SamplingOptions(),
            min_weight_version=party.min_weight_version,
            rollout_id=rollout_id,
            group=rollout_id,
            request_id=party.request_id,
            token_timeout_s=self._limits.generation_timeout_s,
            share=party.share,
            policy=party.policy,
            top_k=request.options.top_k,
            start=sequence.start,
        )
        identity = SequenceIdentity(party.request_id, rollout_id, position)
        budget = SequenceRetries(identity, request.options.retries)
        try:
            return await with_retries(lambda: self._scored(asked, party.generator), budget)
        except Exception as error:
            # A named failure was logged with its traceback where it was noticed.
            unknown = None if isinstance(error, RolloutFailure) else error
            logger.warning("A sequence was not scored: %s", error, exc_info=unknown, extra=identity.log_fields())
            return failure_of(error)
        finally:
            party.generator.release(rollout_id)

    async def _scored(self, asked: ScoringRequest, generator: Generator) -> ScoredPrompt:
        """Asks again until no update of the weights interrupts it."""
        while True:
            refuse_dropped(asked.policy, asked.policy is not None and self._policy.current(asked.policy) is None)
            result = await generator.generate(asked)
            if isinstance(result, ScoredPrompt) and result.finish_reason != "abort":
                return result
            if result.failure is not None:
                raise result.failure


def refuse_other_version(policy: str | None, demanded: int | None, scored_by: int) -> None:
    """Raises `PolicyNotCurrent` unless the sequence was scored by the version that the request demands, if any."""
    if demanded is not None and scored_by != demanded:
        message = f"a newer one has taken its place; version {label_of(policy, scored_by)} scored a sequence"
        raise PolicyNotCurrent(FieldProblem(field="policy.version", message=message, value=demanded))
