"""Reports of trainers about rollouts: for the ledger, metrics, and a check of a replica that parts from its siblings.

Guarantee: a replica is taken out of service only if at least two others give its tokens other log-probabilities, and
differ from it by more than trainers differ from its siblings.
"""

import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.serve import metrics

from deployments.failures import RolloutFailure
from deployments.protocols.generation import ScoredPrompt
from deployments.rollout_records.comparison import TrainerReport
from deployments.rollout_records.failures import RolloutUnknown
from deployments.rollout_records.findings import LEAST_FACTOR
from deployments.rollout_records.ledger import Suspicion
from deployments.rpc.background_tasks import BackgroundTasks
from service.access.keys import Caller
from service.canary.background_canary import ComparedReplicas, scoring_request
from service.rollout_records.recorder import fields_of_record

if TYPE_CHECKING:
    from deployments.rollout_records.store import ReportOutcome, RolloutRecordStore

MOST_SCORED_TOKENS = 8192
LEAST_JUDGES = 2
logger = logging.getLogger("rollout_service.mismatch")


class TrainerReports:
    """The reports that come to one ingress replica."""

    def __init__(self, store: "RolloutRecordStore", replicas: ComparedReplicas) -> None:
        self._store = store
        self._replicas = replicas
        self._checks = BackgroundTasks()
        self._mean_ratio = metrics.Gauge(
            "rollout_mismatch_mean_ratio",
            description="Mean ratio between a trainer's and the sampled probabilities, of the last report.",
            tag_keys=("generator",),
        )
        self._largest_ratio = metrics.Gauge(
            "rollout_mismatch_largest_ratio",
            description="Largest ratio between a trainer's and the sampled probabilities of a token, of that report.",
            tag_keys=("generator",),
        )
        self._causes = metrics.Counter(
            "rollout_mismatch_causes",
            description="Causes of mismatches between trainers and engines that were found.",
            tag_keys=("kind",),
        )

    async def report(self, reports: Sequence[TrainerReport], caller: Caller) -> "ReportOutcome":
        """Raises `StoreLost`."""
        outcome = await self._store.report(reports, caller.namespace)
        for replica, cell in outcome.by_replica.items():
            self._mean_ratio.set(cell.sums.mean_ratio, {"generator": replica})
            self._largest_ratio.set(cell.largest, {"generator": replica})
        for finding in outcome.new:
            self._causes.inc(tags={"kind": finding.kind})
            logger.warning("A trainer and the engines part: %s", finding.message)
        if outcome.suspicion is not None:
            self._checks.start(self._check(outcome.suspicion), Context())
        return outcome

    async def _check(self, suspicion: Suspicion) -> None:
        """Scores what the replica has made on others, and takes it out of service if they side with the trainer."""
        judges = [name for name in self._replicas.replicas() if name != suspicion.replica]
        log_fields = {"replica_id": suspicion.replica}
        try:
            verdicts = [
                (judge, size)
                for judge, part in zip(cycle(judges), [part async for part in self._parts(suspicion)], strict=False)
                if (size := await self._size(judge, part)) is not None
            ]
        except RolloutFailure as failure:
            logger.info("A replica that parts from its siblings was not checked: %s", failure, extra=log_fields)
            return
        against = [judge for judge, size in verdicts if size >= LEAST_FACTOR * suspicion.usual_size]
        judges_against = set(against)
        if len(judges_against) < LEAST_JUDGES or len(against) < len(verdicts):
            logger.warning(
                "The rollouts of a replica part from a trainer more than those of its siblings, and %s of %s checks on "
                "other replicas say the same: it stays in service.",
                len(against),
                len(verdicts),
                extra=log_fields,
            )
            return
        reason = (
            f"Generator replica {suspicion.replica} computes other log-probabilities than its siblings: trainers say "
            f"so, and {len(judges_against)} replicas with the same weights."
        )
        logger.error("A generator replica is taken out of service: %s", reason, extra=log_fields)
        self._causes.inc(tags={"kind": "replica"})
        self._replicas.take_out_of_service(suspicion.replica, reason)
        await self._store.convict(suspicion.replica, f"{reason} It was taken out of service.")

    async def _parts(self, suspicion: Suspicion) -> "AsyncIterator[ScorablePart]":
        """The generations to score: one a rollout."""
        for owner, rollout_id in suspicion.rollouts:
            try:
                kept = await self._store.record(rollout_id, owner)
            except RolloutUnknown:
                continue
            if (part := next(scorable_parts(fields_of_record(kept), suspicion.replica), None)) is not None:
                yield part

    async def _size(self, judge: str, part: "ScorablePart") -> float | None:
        """The mean difference between the judge's and the sampled log-probabilities; `None` if it has other weights."""
        request = scoring_request(part.name, part.prompt, part.tokens, part.policy)
        scored = await self._replicas.score_on(judge, request)
        if not isinstance(scored, ScoredPrompt) or scored.weight_version != part.version:
            return None
        return float(np.abs(np.subtract(scored.prompt_logprobs, part.logprobs)).mean())


@dataclass(frozen=True, slots=True)
class ScorablePart:
    """Tokens that one replica has generated with plain sampling and weights of one version."""

    name: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    version: str
    policy: str | None


def scorable_parts(fields: Mapping[str, Any], replica: str) -> Iterator[ScorablePart]:
    """Those of a record that the replica has made, and that a score gives the same log-probabilities."""
    rollout = fields["rollout"]
    messages, replay = rollout["message_log"], rollout.get("replay") or {}
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    if any(replay.get(name) != value for name, value in plain.items()) or any(map(shows_images, messages)):
        return
    begins = [0]
    for message in messages:
        begins.append(begins[-1] + len(message["token_ids"]))
    log = [token for message in messages for token in message["token_ids"]]
    for made in fields["generations"]:
        message, begin, end = messages[made["message"]], made["start"], made["end"]
        spans = message.get("weight_versions") or ()
        versions = [span["version"] for span in spans if span["start"] < end and begin < span["end"]]
        first = begins[made["message"]]
        if made["replica"] == replica and begin < end and len(versions) == 1 and first + end <= MOST_SCORED_TOKENS:
            name = f"{rollout.get('rollout_id')}-{made['message']}-{begin}"
            tokens, logprobs = message["token_ids"][begin:end], message["generation_logprobs"][begin:end]
            yield ScorablePart(name, log[: first + begin], tokens, logprobs, versions[0], fields.get("policy"))


def shows_images(message: Mapping[str, Any]) -> bool:
    return bool(message.get("mm_ranges"))
