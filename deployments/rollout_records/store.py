"""The store of the records of rollouts, one for the service: the Serve deployment that `rpc/store_client.py` calls.

Records are in memory alone: they are for looking back, and no rollout depends on them.
"""

import asyncio
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from deployments import logs
from deployments.protocols.generation import packed_logprobs
from deployments.rollout_records.book import KeptRecord, RecordBook
from deployments.rollout_records.comparison import ComparedRollout, ReportRefused, TrainerReport, compared
from deployments.rollout_records.failures import RolloutUnknown
from deployments.rollout_records.findings import MismatchFinding
from deployments.rollout_records.ledger import MismatchLedger, Suspicion
from deployments.rollout_records.ratios import Sums, total, totals_by
from deployments.rollout_records.settings import RolloutRecordsSettings
from deployments.rollout_records.trials import Vote
from deployments.upstream.ray_serve.install import install

EXPIRE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """The outcome of a report."""

    compared: int
    all: Sums
    by_replica: dict[str, Sums]
    refused: list[tuple[str, str]]
    """Rollouts that were not compared, each with a sentence."""
    new: list[MismatchFinding]
    causes: list[MismatchFinding]
    """The causes that this report shows."""
    suspicion: Suspicion | None


class RolloutRecordStore:
    """The store of the records. Owners are names of keys; the empty one is that of all where nobody needs a key.

    Args:
        time_s: seconds since 1970.
    """

    def __init__(self, settings: RolloutRecordsSettings, time_s: Callable[[], float] = time.time) -> None:
        logs.configure()
        install()
        self._book = RecordBook(settings)
        self._ledger = MismatchLedger(settings.most_mean_ratio)
        self._time_s = time_s
        self._expiring: asyncio.Task[None] | None = None

    async def keep(self, records: Sequence[KeptRecord]) -> None:
        """Keeps records of rollouts that have ended, for `keep_s` from now on."""
        now = self._time_s()
        for record in records:
            self._book.put(replace(record, kept_at=now))
        if self._expiring is None:
            self._expiring = asyncio.create_task(self._expire())

    async def record(self, rollout_id: str, owner: str) -> KeptRecord:
        """Raises `RolloutUnknown`."""
        return self._book.record(rollout_id, owner)

    async def newest(self, owner: str, most: int) -> list[dict[str, Any]]:
        """At most `most` rollouts of the owner, the newest first: the fields of a `RecordedRollout`."""
        kept = list(islice(self._book.newest(owner), most))
        return await asyncio.to_thread(lambda: [*map(_line_of, kept)])

    async def report(self, reports: Sequence[TrainerReport], owner: str, latest: Mapping[str, int]) -> ReportOutcome:
        """Compares what a trainer has computed, and keeps it in the records.

        Args:
            latest: the latest version of each served policy, by name; that of the policy without one is under ''.
        """
        now, refused, sums = self._time_s(), list[tuple[str, str]](), list[Sums]()
        of_replicas: list[tuple[str, Sums]] = []
        for report in reports:
            try:
                kept = self._book.record(report.rollout_id, owner)
                # In a thread: thousands of tokens each.
                rollout, data = await asyncio.to_thread(_with_report, kept, report, latest, now)
            except (ReportRefused, RolloutUnknown) as error:
                refused.append((report.rollout_id, str(error)))
                continue
            self._book.replace_data(kept, data)
            self._ledger.add(rollout, owner, now)
            sums.append(rollout.sums)
            of_replicas += rollout.sums_by("replica").items()
        new = self._ledger.look(now)
        return ReportOutcome(
            compared=len(sums),
            all=total(sums),
            by_replica=totals_by(of_replicas),
            refused=refused,
            new=new,
            causes=[finding for finding in self._ledger.findings(owner) if finding.last == now],
            suspicion=self._ledger.suspicion(now),
        )

    async def vote(self, replica: str, vote: Vote) -> str | None:
        """A rollout of a suspicion says this of the replica. Returns why that is at fault, if it is by this vote."""
        return self._ledger.vote(replica, vote, self._time_s())

    async def mismatch(self, owner: str) -> dict[str, Any]:
        """The fields of a `Mismatch`."""
        ledger = self._ledger
        return {
            **_fields_of(ledger.all),
            "rollouts": ledger.rollouts,
            "by": {
                name: {value: _fields_of(sums) for value, sums in values.items()} for name, values in ledger.by.items()
            },
            "history": [
                {"at": at, "replica": replica, "version": version, **_fields_of(sums)}
                for (at, replica, version), sums in ledger.history.items()
            ],
            "worst": [{"rollout_id": name, **_ratios_of(sums)} for name, sums in ledger.worst(owner).items()],
            "causes": [*map(asdict, ledger.findings(owner))],
        }

    async def answer(self) -> None:
        """Returns if the store answers."""

    async def _expire(self) -> None:
        while len(self._book):
            await asyncio.sleep(EXPIRE_EVERY_S)
            self._book.expire(self._time_s())
        self._expiring = None


def _with_report(
    kept: KeptRecord, report: TrainerReport, latest: Mapping[str, int], now: float
) -> tuple[ComparedRollout, bytes]:
    """The comparison, and the record with what was reported.

    Raises:
        ReportRefused: the report does not fit the rollout.
    """
    fields = pickle.loads(kept.data)
    rollout = compared(fields, report, latest)
    fields["mismatch"] = {
        **_fields_of(rollout.sums),
        "logprobs": packed_logprobs((rollout.sampled + rollout.difference).tolist()),
        "start": rollout.start,
        "weight_version": report.weight_version,
        "reported_at": now,
    }
    return rollout, pickle.dumps(fields, pickle.HIGHEST_PROTOCOL)


def _line_of(kept: KeptRecord) -> dict[str, Any]:
    fields = pickle.loads(kept.data)
    rollout, reported = fields["rollout"], fields.get("mismatch")
    return {
        "rollout_id": kept.rollout_id,
        "request_id": fields["request_id"],
        **{name: rollout[name] for name in ("task_name", "status", "total_reward")},
        "ended_at": kept.ended_at,
        **({} if reported is None else {"mean_ratio": reported["mean_ratio"]}),
    }


def _fields_of(sums: Sums) -> dict[str, Any]:
    """The fields of `MismatchSums`."""
    return {"tokens": sums.tokens, **_ratios_of(sums)}


def _ratios_of(sums: Sums) -> dict[str, float]:
    return {name: getattr(sums, name) for name in ("mean_ratio", "share_beyond", "largest_ratio")}
