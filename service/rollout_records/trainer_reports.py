"""Reports of trainers about rollouts: for the ledger, and a check of a replica that parts from its siblings.

Guarantee: a replica is taken out of service only by scores of its tokens on two others and on itself, as
`deployments/rollout_records/trials.py` says. Reports choose whose tokens are scored.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from deployments.failures import RolloutFailure
from deployments.protocols.generation import ScoredPrompt, ScoringRequest, scoring_request
from deployments.rollout_records.book import RolloutUnknown
from deployments.rollout_records.comparison import TrainerReport
from deployments.rollout_records.ledger import Suspicion
from deployments.rollout_records.trials import LEAST_TOKENS, MadeRollout, Vote, votes
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.messages import may_be_compared
from service.access.keys import Caller
from service.rollout_records.recorder import fields_of_record

if TYPE_CHECKING:
    from deployments.rollout_records.store import RolloutRecordStore
    from service.remote.generator import RemoteGenerator

MOST_SCORED_TOKENS = 8192
JUDGES = 2
ONE_REPORT = "it has no logprobs, or an earlier report in this body: send one report with numbers for each rollout"
PLAIN_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
logger = logging.getLogger("rollout_service.mismatch")


class TrainerReports:
    """The reports that come to one ingress replica.

    Args:
        latest_versions: the latest version of each policy, by name; that of the policy without one is under ''.
    """

    def __init__(
        self, store: "RolloutRecordStore", replicas: "RemoteGenerator", latest_versions: Callable[[], Mapping[str, int]]
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._latest_versions = latest_versions
        self._checks = BackgroundTasks()

    async def report(self, reports: Sequence[TrainerReport], caller: Caller) -> dict[str, Any]:
        """Compares the reports, and returns the fields of a `ReportAnswer`. Raises `StoreLost`.

        A rollout counts once, and a report without numbers is refused: each costs the store the reading of a record.
        """
        first: dict[str, TrainerReport] = {}
        refused = list[dict[str, str]]()
        for report in reports:
            if not len(report.logprobs) or first.setdefault(report.rollout_id, report) is not report:
                refused.append({"rollout_id": report.rollout_id, "message": ONE_REPORT})
        answer, suspicion = await self._store.report([*first.values()], caller.namespace, self._latest_versions())
        if suspicion is not None:
            self._checks.start(self._check(suspicion), Context())
        return {**answer, "refused": [*answer["refused"], *refused]}

    async def _check(self, suspicion: Suspicion) -> None:
        """Scores what the replica has made, until its trial has come to an end, and takes it out of service if it is
        at fault."""
        suspect, log_fields = suspicion.replica, {"replica_id": suspicion.replica}
        said: list[str] = []
        for rollout in suspicion.rollouts:
            try:
                vote = await self._vote(suspect, rollout)
                reason = await self._store.vote(suspect, vote)
            except (RolloutFailure, RolloutUnknown) as failure:
                logger.info("A rollout of a replica was not scored again: %s", failure, extra=log_fields)
                continue
            said.append(vote.name)
            if reason is not None:
                logger.error("A generator replica is taken out of service: %s", reason, extra=log_fields)
                self._replicas.take_out_of_service(suspect, reason)
                return
        logger.info(
            "The rollouts of a replica part from a trainer more than those of its siblings. By their scores on it and "
            "on two others they say: %s. So far it stays in service.",
            ", ".join(said),
            extra=log_fields,
        )

    async def _vote(self, suspect: str, rollout: MadeRollout) -> Vote:
        """The word of a rollout about the replica; nothing if it cannot be scored, or there are no two others."""
        kept = await self._store.record(rollout.rollout_id, rollout.owner)
        part = _scorable_part(fields_of_record(kept), suspect)
        others = [name for name in self._replicas.replicas() if name != suspect]
        if part is None or len(others) < JUDGES:
            return Vote.NOTHING
        by = [suspect, *random.sample(others, JUDGES)]
        scored = await asyncio.gather(*(self._replicas.score_on(replica, part.request) for replica in by))
        # A replica that has other weights by now says nothing.
        scores = [
            score.prompt_logprobs
            for score in scored
            if isinstance(score, ScoredPrompt) and score.weight_version == part.version
        ]
        return Vote(votes(part.logprobs, *scores).item()) if len(scores) == len(scored) else Vote.NOTHING


class _ScorablePart(NamedTuple):
    """Tokens that one replica has generated with plain sampling and weights of one version."""

    request: ScoringRequest
    """Asks for the log-probabilities of the tokens behind their prompt."""
    logprobs: Sequence[float]
    version: str


def _scorable_part(fields: Mapping[str, Any], replica: str) -> _ScorablePart | None:
    """The first of a record that the replica has made, and that a score gives the same log-probabilities."""
    rollout = fields["rollout"]
    messages, replay = rollout["message_log"], rollout.get("replay") or {}
    shows_images = any(message.get("mm_ranges") for message in messages)
    if shows_images or any(replay.get(name) != value for name, value in PLAIN_SAMPLING.items()):
        return None
    begins = [0, *accumulate(len(message["token_ids"]) for message in messages)]
    log = [token for message in messages for token in message["token_ids"]]
    for made in fields["generations"]:
        message, begin, end = messages[made["message"]], made["start"], made["end"]
        spans = message.get("weight_versions") or ()
        versions = [span["version"] for span in spans if span["start"] < end and begin < span["end"]]
        first = begins[made["message"]]
        is_enough = end - begin >= LEAST_TOKENS and first + end <= MOST_SCORED_TOKENS
        if made["replica"] == replica and is_enough and len(versions) == 1 and may_be_compared(message):
            name = f"check-{rollout.get('rollout_id')}-{made['message']}-{begin}"
            request = scoring_request(name, log[: first + end], first + begin, policy=fields.get("policy"))
            return _ScorablePart(request, message["generation_logprobs"][begin:end], versions[0])
    return None
