"""The jobs that a store keeps, found by id, key, caller and age, and the room that they take. No I/O, no clock.

`Leases` says which of their owners live, as far as the store has heard.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from deployments.jobs.failures import JobsFull
from deployments.jobs.records import Change, JobRecord
from deployments.jobs.settings import JobsSettings
from deployments.storage.storage import EntryName

REFUSED_KEPT_S = 60.0
"""Retention of a refused job: those who wait for it ask for its events within seconds."""


@dataclass(slots=True)
class KeptJob:
    """A job with the sizes of its entries, in bytes. Times are on the monotonic clock."""

    record: JobRecord
    sizes: dict[EntryName, int] = field(default_factory=dict)
    given_at: float = 0.0
    """When it was last given to its owner, or the store began."""
    size_bytes: int = 0

    def change(self, change: Change) -> None:
        for name in change.removed:
            self.size_bytes -= self.sizes.pop(name, 0)
        for name, data in change.added.items():
            self.size_bytes += len(data) - self.sizes.get(name, 0)
            self.sizes[name] = len(data)


@dataclass(slots=True)
class Amount:
    """The room that jobs take. Refused jobs take none."""

    jobs: int = 0
    size_bytes: int = 0


class KeptJobs:
    def __init__(self, settings: JobsSettings) -> None:
        self._settings = settings
        self._jobs: dict[str, KeptJob] = {}
        self.unfinished: dict[str, KeptJob] = {}
        """Jobs that wait or run, by id."""
        self._finished: dict[str, KeptJob] = {}
        """Jobs that have ended, the first one to expire first."""
        self._refused: dict[str, KeptJob] = {}
        """Refused jobs, the first one to expire first."""
        self._by_key: dict[tuple[str, str], KeptJob] = {}
        self.total = Amount()
        self._of_caller: defaultdict[str, Amount] = defaultdict(Amount)

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, job_id: str) -> KeptJob | None:
        return self._jobs.get(job_id)

    def of_key(self, namespace: str, key: str | None) -> KeptJob | None:
        return None if key is None else self._by_key.get((namespace, key))

    def of_caller(self, namespace: str) -> list[JobRecord]:
        """The newest first."""
        records = (job.record for job in self._jobs.values() if job.record.namespace == namespace)
        return sorted(records, key=lambda record: record.created_at, reverse=True)

    def expired(self, time_s: float) -> list[str]:
        """Ids of the jobs that have been kept long enough."""

        def old(jobs: dict[str, KeptJob], kept_s: float) -> list[str]:
            ended = ((job_id, job.record.ended_at or 0.0) for job_id, job in jobs.items())
            return [job_id for job_id, _ in takewhile(lambda pair: time_s - pair[1] >= kept_s, ended)]

        return [*old(self._finished, self._settings.keep_s), *old(self._refused, REFUSED_KEPT_S)]

    def refuse_if_full(self, namespace: str, body_bytes: int) -> None:
        """Raises `JobsFull` if there is no room for another job with this body."""
        settings = self._settings
        refuse_beyond(self.total, body_bytes, settings.max_jobs, settings.max_bytes, "all callers", "")
        if namespace:
            share = settings.max_share
            most_jobs, most_bytes = max(int(settings.max_jobs * share), 1), int(settings.max_bytes * share)
            share_said = f" x jobs.max_share ({share:g})"
            refuse_beyond(self._of_caller[namespace], body_bytes, most_jobs, most_bytes, "this caller", share_said)

    def apply(self, change: Change, now: float) -> None:
        """Makes a change that was stored."""
        job = self._jobs.get(change.job_id)
        if job is not None:
            self._remove(job)
        if change.record is None:
            self._jobs.pop(change.job_id, None)
            return
        if job is None:
            job = KeptJob(change.record, given_at=now)
        if job.record.epoch != change.record.epoch:
            job.given_at = now
        job.record = change.record
        job.change(change)
        self.add(job)

    def add(self, job: KeptJob) -> None:
        record = job.record
        self._jobs[record.job_id] = job
        self._place_of(record)[record.job_id] = job
        if record.key is not None:
            self._by_key[record.namespace, record.key] = job
        self._count(job, 1)

    def _remove(self, job: KeptJob) -> None:
        """Leaves only the job's place among all jobs."""
        record = job.record
        del self._place_of(record)[record.job_id]
        if record.key is not None:
            self._by_key.pop((record.namespace, record.key), None)
        self._count(job, -1)

    def _place_of(self, record: JobRecord) -> dict[str, KeptJob]:
        if record.ended_at is None:
            return self.unfinished
        return self._refused if record.was_refused else self._finished

    def _count(self, job: KeptJob, sign: Literal[1, -1]) -> None:
        if job.record.was_refused:
            return
        for amount in (self.total, self._of_caller[job.record.namespace]):
            amount.jobs += sign
            amount.size_bytes += sign * job.size_bytes


def refuse_beyond(kept: Amount, body_bytes: int, most_jobs: int, most_bytes: int, whose: str, share: str) -> None:
    """Raises `JobsFull`.

    Args:
        share: the caller's share of the settings, in words.
    """
    if kept.jobs >= most_jobs:
        message = f"{kept.jobs} jobs of {whose} are kept and jobs.max_jobs{share} allows {most_jobs}"
        raise JobsFull.of("", f"{message}; delete those that you do not need, or try again later")
    if kept.size_bytes + body_bytes > most_bytes:
        message = f"the kept jobs of {whose} have {kept.size_bytes} bytes and jobs.max_bytes{share} allows {most_bytes}"
        raise JobsFull.of("", f"{message}; acknowledge or delete what you do not need, or try again later")


class Leases:
    """Owners that were heard of within `lease_s` seconds. Times are seconds of any one clock.

    A store that starts anew has heard of nobody: it calls `heard` for each owner that it finds, so that its absence
    counts against none of them.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._heard_at: dict[str, float] = {}

    def heard(self, owner: str, now: float) -> None:
        self._heard_at[owner] = max(now, self._heard_at.get(owner, now))

    def heard_at(self, owner: str) -> float:
        """When the owner was last heard of; 0 if it never was."""
        return self._heard_at.get(owner, 0.0)

    def lost(self, now: float) -> list[str]:
        """Owners whose lease has expired."""
        return [owner for owner, heard_at in self._heard_at.items() if now - heard_at > self._lease_s]

    def forget(self, owners: Iterable[str]) -> None:
        """Drops owners without jobs. One that is heard of again is known again."""
        for owner in owners:
            self._heard_at.pop(owner, None)
