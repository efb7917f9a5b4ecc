"""Reports of trainers about rollouts: for the ledger, metrics, and a check of a replica that parts from its siblings.

The bodies of `POST /rollouts/logprobs` are JSON or Arrow.

Guarantee: a replica is taken out of service only by scores of its tokens on two others and on itself, as
`deployments/rollout_records/trials.py` says. Reports choose whose tokens are scored.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context
from itertools import accumulate, count, islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from pydantic import ValidationError
from ray.serve import metrics

from deployments.failures import RolloutFailure
from deployments.protocols.generation import Generation, SamplingOptions, ScoredPrompt, ScoringRequest
from deployments.rollout_records.comparison import TrainerReport
from deployments.rollout_records.failures import RolloutUnknown
from deployments.rollout_records.ledger import Suspicion
from deployments.rollout_records.trials import LEAST_TOKENS, MadeRollout, Vote, votes
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.arrow.schema import LOGPROBS_REPORT
from rollout_client.contract.mismatch import MOST_REPORTS, LogprobsReport
from rollout_client.contract.problems import FieldProblem
from rollout_client.contract.training import may_be_compared
from service.access.keys import Caller
from service.problems import invalid_request, unreadable_body, validation_problem
from service.rollout_records.recorder import fields_of_record
from service.rollout_requests.arrow_body import read_table

if TYPE_CHECKING:
    from deployments.rollout_records.store import ReportOutcome, RolloutRecordStore

MOST_SCORED_TOKENS = 8192
JUDGES = 2
NO_NUMBERS = "0 logprobs: send one for each token that is to be compared, or leave the rollout out"
REPORTED_TWICE = "it is reported twice in this body, and the first report of it is taken: send one for each rollout"
GAUGES = {
    "mean_ratio": "Mean ratio between a trainer's and the sampled probabilities, each 10 at most, of a report.",
    "share_beyond": "Share of the tokens of that report whose ratio is beyond 10.",
    "largest_ratio": "Largest ratio between a trainer's and the sampled probabilities of a token, of that report.",
}
"""By the field of `Sums`, which the last report of a replica sets."""
logger = logging.getLogger("rollout_service.mismatch")


class _ComparedReplicas(Protocol):
    """The generator replicas, as their checks call them."""

    def replicas(self) -> Sequence[str]:
        """The ids of the running replicas."""

    async def score_on(self, replica: str, request: ScoringRequest) -> Generation:
        """Scores on this replica, with the lowest share. Raises `RolloutFailure`."""

    def take_out_of_service(self, replica: str, reason: str) -> None:
        """Lets the replica refuse generations and be replaced. Its result is not waited for."""


class TrainerReports:
    """The reports that come to one ingress replica.

    Args:
        latest_versions: the latest version of each policy, by name; that of the policy without one is under ''.
    """

    def __init__(
        self, store: "RolloutRecordStore", replicas: _ComparedReplicas, latest_versions: Callable[[], Mapping[str, int]]
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._latest_versions = latest_versions
        self._checks = BackgroundTasks()
        self._turns = count()
        """Places of judges: a rollout has other ones than the one before, where there are enough."""
        self._gauges = {
            name: metrics.Gauge(f"rollout_mismatch_{name}", description=description, tag_keys=("generator",))
            for name, description in GAUGES.items()
        }
        self._causes = metrics.Counter(
            "rollout_mismatch_causes",
            description="Causes of mismatches between trainers and engines that were found.",
            tag_keys=("kind",),
        )

    async def report(self, reports: Sequence[TrainerReport], caller: Caller) -> "ReportOutcome":
        """Compares the reports. A rollout counts once, and a report without numbers is refused: each costs the store
        the reading of a record. Raises `StoreLost`."""
        first: dict[str, TrainerReport] = {}
        refused: list[tuple[str, str]] = []
        for report in reports:
            if not len(report.logprobs):
                refused.append((report.rollout_id, NO_NUMBERS))
            elif first.setdefault(report.rollout_id, report) is not report:
                refused.append((report.rollout_id, REPORTED_TWICE))
        outcome = await self._store.report([*first.values()], caller.namespace, self._latest_versions())
        outcome.refused.extend(refused)
        for replica, sums in outcome.by_replica.items():
            tags = {"generator": replica}
            for name, gauge in self._gauges.items():
                gauge.set(getattr(sums, name), tags)
        for finding in outcome.new:
            self._causes.inc(tags={"kind": finding.kind})
            logger.warning("A trainer and the engines part: %s", finding.message)
        if outcome.suspicion is not None:
            self._checks.start(self._check(outcome.suspicion), Context())
        return outcome

    async def _check(self, suspicion: Suspicion) -> None:
        """Scores what the replica has made, until its trial has come to an end, and takes it out of service if it is
        at fault."""
        suspect, log_fields = suspicion.replica, {"replica_id": suspicion.replica}
        said = Counter[Vote]()
        for rollout in suspicion.rollouts:
            try:
                vote = await self._vote(suspect, rollout)
                reason = await self._store.vote(suspect, vote)
            except (RolloutFailure, RolloutUnknown) as failure:
                logger.info("A rollout of a replica was not scored again: %s", failure, extra=log_fields)
                continue
            said[vote] += 1
            if reason is not None:
                logger.error("A generator replica is taken out of service: %s", reason, extra=log_fields)
                self._causes.inc(tags={"kind": "replica"})
                self._replicas.take_out_of_service(suspect, reason)
                return
        logger.info(
            "The rollouts of a replica part from a trainer more than those of its siblings. %s of them were looked at: "
            "by the scores of the replica and of two others %s say the same, and %s the opposite. So far it stays in "
            "service.",
            len(suspicion.rollouts),
            said[Vote.AGAINST],
            said[Vote.IN_FAVOUR],
            extra=log_fields,
        )

    async def _vote(self, suspect: str, rollout: MadeRollout) -> Vote:
        """The word of a rollout about the replica; nothing if it cannot be scored, or there are no two others."""
        kept = await self._store.record(rollout.rollout_id, rollout.owner)
        part = next(_scorable_parts(fields_of_record(kept), suspect), None)
        others = [name for name in self._replicas.replicas() if name != suspect]
        if part is None or len(others) < JUDGES:
            return Vote.NOTHING
        judges = [others[turn % len(others)] for turn in islice(self._turns, JUDGES)]
        scored = await asyncio.gather(
            *(self._replicas.score_on(replica, part.request) for replica in (suspect, *judges))
        )
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


def _scorable_parts(fields: Mapping[str, Any], replica: str) -> Iterator[_ScorablePart]:
    """Those of a record that the replica has made, and that a score gives the same log-probabilities."""
    rollout = fields["rollout"]
    messages, replay = rollout["message_log"], rollout.get("replay") or {}
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    shows_images = any(message.get("mm_ranges") for message in messages)
    if shows_images or any(replay.get(name) != value for name, value in plain.items()):
        return
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
            request = ScoringRequest(
                generation_id=name,
                prompt_token_ids=log[: first + end],
                max_new_tokens=1,
                stop_strings=(),
                sampling=SamplingOptions(),
                rollout_id=name,
                group=name,
                policy=fields.get("policy"),
                start=first + begin,
            )
            yield _ScorablePart(request, message["generation_logprobs"][begin:end], versions[0])


def reports_of_json(body: bytes | bytearray) -> list[TrainerReport]:
    """Raises `RequestProblem`: the body is not a `LogprobsReport`."""
    try:
        given = LogprobsReport.model_validate_json(body)
    except ValidationError as error:
        raise validation_problem(error) from error
    return [
        TrainerReport(
            one.rollout_id,
            np.array([np.nan if logprob is None else logprob for logprob in one.logprobs], np.float64),
            None if one.mask is None else np.array(one.mask, bool),
            None if one.token_ids is None else np.array(one.token_ids, np.int64),
            one.weight_version,
            one.start,
        )
        for one in given.reports
    ]


def reports_of_arrow(body: bytes | bytearray) -> list[TrainerReport]:
    """Raises `RequestProblem`: it is not an Arrow stream of `LOGPROBS_REPORT`, or has more than `MOST_REPORTS` rows."""
    try:
        table = read_table(body, LOGPROBS_REPORT, "logprobs", "reports[]")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise unreadable_body(f"{str(error).rstrip('.')}; send one Arrow stream of reports") from error
    if "rollout_id" not in table.schema.names:
        raise invalid_request(FieldProblem(field="reports[].rollout_id", message="this column is missing"))
    if len(table) > MOST_REPORTS:
        message = f"{len(table)} reports, and a body may have {MOST_REPORTS}: send them in several"
        raise invalid_request(FieldProblem(field="reports", message=message))
    columns = {name: table[name] for name in table.schema.names}
    if missing := [name for name in ("rollout_id", "logprobs") if columns[name].null_count]:
        raise invalid_request(FieldProblem(field=f"reports[].{missing[0]}", message="a row has none"))
    rows = range(len(table))
    return [TrainerReport(**{name: _value_of(column[row]) for name, column in columns.items()}) for row in rows]


def _value_of(value: pa.Scalar) -> Any:
    if not value.is_valid:
        return None
    return value.values.to_numpy(zero_copy_only=False) if isinstance(value, pa.ListScalar) else value.as_py()
