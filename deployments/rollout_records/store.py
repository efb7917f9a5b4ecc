"""The store of the records of rollouts, one for the service: the Serve deployment that `rpc/handle_calls.py` calls.

Records are in memory alone: they are for looking back, and no rollout depends on them.
"""

import asyncio
import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from ray.serve import metrics

from deployments import logs
from deployments.rollout_records.book import KeptRecord, RecordBook, RolloutRecordsSettings, RolloutUnknown
from deployments.rollout_records.comparison import (
    ComparedRollout,
    ReportRefused,
    Sums,
    TrainerReport,
    compared,
    totals_by,
)
from deployments.rollout_records.ledger import MismatchLedger, Suspicion
from deployments.rollout_records.trials import Vote
from deployments.upstream.ray_serve.own_replica import install

logger = logging.getLogger("rollout_service.mismatch")


class RolloutRecordStore:
    """The store of the records. Owners are names of keys; the empty one is that of all where nobody needs a key.

    Args:
        time_s: seconds since 1970.
    """

    def __init__(self, settings: RolloutRecordsSettings, time_s: Callable[[], float] = time.time) -> None:
        logs.configure()
        install()
        self._book = RecordBook(settings.max_bytes)
        self._ledger = MismatchLedger(settings.most_mean_ratio)
        self._time_s = time_s
        self._mean_ratio = metrics.Gauge(
            "rollout_mismatch_mean_ratio",
            description="Mean ratio between a trainer's and the sampled probabilities, each 10 at most, of a report.",
            tag_keys=("generator",),
        )
        self._causes = metrics.Counter(
            "rollout_mismatch_causes",
            description="Causes of mismatches between trainers and engines that were found.",
            tag_keys=("kind",),
        )

    async def keep(self, records: Sequence[KeptRecord]) -> None:
        """Keeps records of rollouts that have ended."""
        for record in records:
            self._book.put(record)

    async def record(self, rollout_id: str, owner: str) -> KeptRecord:
        """Raises `RolloutUnknown`."""
        return self._book.record(rollout_id, owner)

    async def newest(self, owner: str, most: int) -> list[dict[str, Any]]:
        """At most `most` rollouts of the owner, the newest first: the fields of a `RecordedRollout`."""
        kept = list(islice(self._book.newest(owner), most))
        return await asyncio.to_thread(lambda: [*map(_line_of, kept)])

    async def report(
        self, reports: Sequence[TrainerReport], owner: str, latest: Mapping[str, int]
    ) -> tuple[dict[str, Any], Suspicion | None]:
        """Compares what a trainer has computed, and keeps it in the records.

        Args:
            latest: the latest version of each served policy, by name; that of the policy without one is under ''.

        Returns:
            The fields of a `ReportAnswer`, and a replica whose rollouts are to be scored again.
        """
        now, refused, rollouts = self._time_s(), list[dict[str, str]](), list[ComparedRollout]()
        for report in reports:
            try:
                kept = self._book.record(report.rollout_id, owner)
                # In a thread: thousands of tokens each.
                rollout, noted = await asyncio.to_thread(_with_report, kept, report, latest, now)
            except (ReportRefused, RolloutUnknown) as error:
                refused.append({"rollout_id": report.rollout_id, "message": str(error)})
                continue
            self._book.replace(kept, noted)
            self._ledger.add(rollout, owner)
            rollouts.append(rollout)
        new, suspicion = self._ledger.look(now)
        for finding in new:
            self._causes.inc(tags={"kind": finding.kind})
            logger.warning("A trainer and the engines part: %s", finding.message)
        of_replicas = totals_by(of_replica for rollout in rollouts for of_replica in rollout.by["replica"].items())
        for replica, sums in of_replicas.items():
            self._mean_ratio.set(sums.mean_ratio, {"generator": replica})
        answer = {
            **sum((rollout.sums for rollout in rollouts), Sums()).fields,
            "compared": len(rollouts),
            "refused": refused,
            "causes": [asdict(finding) for finding in self._ledger.findings(owner) if finding.last == now],
        }
        return answer, suspicion

    async def vote(self, replica: str, vote: Vote) -> str | None:
        """A rollout of a suspicion says this of the replica. Returns why that is at fault, if it is by this vote."""
        reason = self._ledger.vote(replica, vote, self._time_s())
        if reason is not None:
            self._causes.inc(tags={"kind": "replica"})
        return reason

    async def mismatch(self, owner: str) -> dict[str, Any]:
        """The fields of a `Mismatch`."""
        ledger = self._ledger
        return {
            **ledger.all.fields,
            "rollouts": ledger.rollouts,
            "by": {name: {value: sums.fields for value, sums in values.items()} for name, values in ledger.by.items()},
            "worst": [{"rollout_id": name, **sums.fields} for name, sums in ledger.worst(owner).items()],
            "causes": [*map(asdict, ledger.findings(owner))],
        }

    async def answer(self) -> None:
        """Returns if the store answers."""


def _with_report(
    kept: KeptRecord, report: TrainerReport, latest: Mapping[str, int], now: float
) -> tuple[ComparedRollout, KeptRecord]:
    """The comparison, and the record with what was reported.

    Raises:
        ReportRefused: the report does not fit the rollout.
    """
    fields = pickle.loads(kept.data)
    rollout, noted = compared(fields, report, latest)
    fields["mismatch"] = {**noted, "reported_at": now}
    return rollout, replace(kept, data=pickle.dumps(fields, pickle.HIGHEST_PROTOCOL))


def _line_of(kept: KeptRecord) -> dict[str, Any]:
    fields = pickle.loads(kept.data)
    rollout, reported = fields["rollout"], fields.get("mismatch")
    return {
        "rollout_id": kept.rollout_id,
        "request_id": fields["request_id"],
        **{name: rollout[name] for name in ("task_name", "status", "total_reward")},
        "ended_at": fields["ended_at"],
        **({} if reported is None else {"mean_ratio": reported["mean_ratio"]}),
    }
