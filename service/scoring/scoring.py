"""Scores the sequences of `POST /score` over the `Generator` port, as generations of one token each.

Guarantees: each sequence is scored exactly once by one version of the weights, or has the failure that broke it; the
sequences share the engines with the generations of all other requests; cancelling a request cancels all its calls.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from uuid import uuid4

from deployments.failures import RolloutFailure, failure_of
from deployments.policy.failures import PolicyNotCurrent
from deployments.protocols.generation import Generator, ScoredPrompt, ScoringRequest, scoring_request
from deployments.protocols.replicas import GeneratorDescription
from rollout_client.contract.base import FieldProblem, read_label
from rollout_client.contract.rollouts import PolicyVersions, SampleError
from service.access.keys import ANYBODY, Caller
from service.remote.policy import RemotePolicy
from service.rollout_requests.parsing import ParsedScoreRequest, ScoreBounds
from service.rollouts.metrics import policy_versions
from service.rollouts.retries import RetryBudget, with_retries
from service.rollouts.staleness import refuse_dropped
from service.scheduling.fair_queue import share_of
from service.settings import RequestLimits

MOST_AT_ONCE = 2048
"""Sequences of one request that wait or run: more than the engines of a large service run at once."""
logger = logging.getLogger("rollout_service.scoring")
Score = ScoredPrompt | SampleError
OnScore = Callable[[int, Score], Awaitable[None]]


class Scoring:
    """Scores the sequences of requests.

    Args:
        engine: the limits of the engines.
    """

    def __init__(
        self, generator: Generator, policy: RemotePolicy, limits: RequestLimits, engine: GeneratorDescription
    ) -> None:
        self._generator = generator
        self._policy = policy
        self._limits = limits
        most = limits.max_rollouts_per_request
        # The last token of a prompt without room for another is one that the score names: not beside drafts.
        longest = engine.max_model_len - bool(engine.drafts)
        self.bounds = ScoreBounds(most, longest, engine.vocab_size, engine.image_token_ids)
        """Limits of one request."""

    async def score(
        self, request: ParsedScoreRequest, request_id: str, on_score: OnScore, caller: Caller = ANYBODY
    ) -> PolicyVersions:
        """Waits for the weights that the request demands, and scores its sequences.

        Args:
            on_score: awaited for each sequence with its position, once it is scored or has failed.

        Returns:
            The versions that scored them.

        Raises:
            PolicyNotCurrent: the weights that it demands are not current, or were replaced meanwhile.
            PolicyUnknown: it names a policy that does not exist.
            PolicyStoreLost: the policy store does not answer.
        """
        demanded = request.policy
        await self._policy.wait_for_version(demanded)
        share = share_of(f"{request_id}-{uuid4().hex[:16]}", request.priority, caller)
        asked = {
            "min_weight_version": max(demanded.min_version or 0, demanded.version or 0),
            "request_id": request_id,
            "share": share,
            "policy": demanded.name,
            "top_k": request.top_k,
        }
        versions: set[int] = set()
        waiting = enumerate(zip(request.sequences, request.starts, strict=True))

        async def score_next() -> None:
            for position, (token_ids, start) in waiting:
                of_sequence = scoring_request(f"{share.id}-{position}", token_ids, start, **asked)
                score = await self._score_of(of_sequence, position, request.retries)
                if isinstance(score, ScoredPrompt):
                    scored_by = read_label(score.weight_version).number
                    versions.add(scored_by)
                    if demanded.version not in (None, scored_by):
                        message = f"a newer one has taken its place; version {score.weight_version} scored a sequence"
                        raise PolicyNotCurrent(
                            FieldProblem(field="policy.version", message=message, value=demanded.version)
                        )
                await on_score(position, score)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(MOST_AT_ONCE, len(request.sequences))):
                    group.create_task(score_next())
        except ExceptionGroup as group:
            if (refused := group.subgroup(PolicyNotCurrent)) is not None:
                raise refused.exceptions[0] from None
            raise
        return policy_versions(demanded.name, versions, self._policy.current(demanded.name))

    async def _score_of(self, asked: ScoringRequest, position: int, retries: int) -> Score:
        """The score of the sequence at this position, or the failure that broke it."""
        log_fields = {"request_id": asked.request_id, "rollout_id": asked.rollout_id, "sample": position}

        async def scored() -> ScoredPrompt:
            # Until no update of the weights interrupts it.
            while True:
                refuse_dropped(asked.policy, asked.policy is not None and self._policy.current(asked.policy) is None)
                result = await self._generator.generate(asked)
                if isinstance(result, ScoredPrompt) and result.finish_reason != "abort":
                    return result
                if result.failure is not None:
                    raise result.failure

        try:
            return await with_retries(scored, RetryBudget(log_fields, retries))
        except Exception as error:
            # A named failure was logged with its traceback where it was noticed.
            unknown = None if isinstance(error, RolloutFailure) else error
            logger.warning("A sequence was not scored: %s", error, exc_info=unknown, extra=log_fields)
            return failure_of(error)
        finally:
            self._generator.release(asked.rollout_id)
