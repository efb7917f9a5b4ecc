"""Who plays which job, what is kept of it, and what each call changes. A state machine: no I/O, no clock.

    open -> running -> completed | failed -> (acknowledged, deleted or expired)
            running -> waiting -> running      its ingress replica was lost; the next one has a new epoch

Guarantees: a key belongs to one request of one caller until its job is gone; at any time at most one owner and epoch
may write to a job; events are numbered from 1 without gaps and none changes; an event is there until it is acknowledged
or its job is gone; a job that has ended takes no further write.

Each method that changes something only returns the changes. `commit` makes them after they were stored: nothing is
reported to a caller before it is stored.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Literal
from uuid import uuid4

from deployments.jobs.failures import (
    EventsAcknowledged,
    EventUnknown,
    JobFailure,
    JobsFull,
    JobUnknown,
    KeyReused,
    NoDataSet,
    job_unknown,
)
from deployments.jobs.records import (
    Change,
    Claim,
    EntryKind,
    JobCommands,
    JobRecord,
    JobRequest,
    JobWrite,
    OpenedJob,
    decode_record,
)
from deployments.jobs.settings import JobsSettings
from deployments.storage.storage import EntryName, StoredRecord

BODY = EntryName("body", 0)
ONLY_FOR_THE_RUN: tuple[EntryKind, ...] = ("body", "journal", "outline")
"""Entries that are removed at the end."""
MOST_OFFERED = 8
"""Waiting jobs that one ingress replica is told of at once: it claims them before its next poll."""
BYTES_PER_JOB = 2**16
"""Room that each job takes beside its entries: `max_bytes` bounds how many small jobs are kept."""
REFUSED_KEPT_S = 60.0
"""Retention of a refused job: those who wait for it ask for its events within seconds."""


@dataclass(slots=True)
class _KeptJob:
    """A job with the sizes of its entries, in bytes. Times are on the monotonic clock."""

    record: JobRecord
    sizes: dict[EntryName, int] = field(default_factory=dict)
    heard_at: float = 0.0
    """When its owner was given it or last said that it plays it, or the store began."""
    size_bytes: int = BYTES_PER_JOB
    """The room that it takes. Refused jobs take none."""

    def change(self, change: Change) -> None:
        for name in change.removed:
            self.size_bytes -= self.sizes.pop(name, 0)
        for name, data in change.added.items():
            self.size_bytes += len(data) - self.sizes.get(name, 0)
            self.sizes[name] = len(data)


class JobRegistry:
    """In all methods `now` is monotonic and `time_s` counts from 1970, both in seconds."""

    def __init__(self, settings: JobsSettings, stored: Iterable[StoredRecord], now: float) -> None:
        self._settings = settings
        self._jobs: dict[str, _KeptJob] = {}
        self._unfinished: dict[str, _KeptJob] = {}
        """Jobs that wait or run, by id."""
        self._finished: dict[str, _KeptJob] = {}
        """Jobs that have ended, the first one to expire first."""
        self._refused: dict[str, _KeptJob] = {}
        """Refused jobs, the first one to expire first."""
        self._by_key: dict[tuple[str, str], _KeptJob] = {}
        self.total_bytes = 0
        self._bytes_of: Counter[str] = Counter()
        """By namespace."""
        loaded = ((decode_record(each.record), each.sizes) for each in stored)
        for record, sizes in sorted(loaded, key=lambda pair: pair[0].ended_at or 0.0):
            # The absence of the store counts against no owner: each lease begins now.
            self._add(_KeptJob(record, dict(sizes), now, BYTES_PER_JOB + sum(sizes.values())))

    def __len__(self) -> int:
        return len(self._jobs)

    # Calls for a caller of the service.

    def record(self, job_id: str, namespace: str) -> JobRecord:
        """Raises `JobUnknown`."""
        return self._job(job_id, namespace).record

    def records(self, namespace: str) -> list[JobRecord]:
        """The jobs of the caller, the newest first."""
        records = (job.record for job in self._jobs.values() if job.record.namespace == namespace)
        return sorted(records, key=lambda record: record.created_at, reverse=True)

    def events_after(self, job_id: str, namespace: str, after: int, most_bytes: int) -> list[EntryName]:
        """The next events, at least one if there is any, and no more than have `most_bytes`.

        Raises:
            JobUnknown, EventUnknown
            EventsAcknowledged: the events that follow are not kept any longer.
        """
        job = self._job(job_id, namespace)
        record = job.record
        if after > record.last_event:
            raise _event_unknown(record, after)
        if after < record.acknowledged:
            message = f"events up to {record.acknowledged} were acknowledged; ask for those after it"
            raise EventsAcknowledged.of("after", message, after)
        names: list[EntryName] = []
        size = 0
        for number in range(after + 1, record.last_event + 1):
            size += job.sizes[EntryName("event", number)]
            if names and size > most_bytes:
                break
            names.append(EntryName("event", number))
        return names

    def ledger(self, job_id: str, namespace: str, after: int) -> list[EntryName]:
        """The ledger's entries for the events up to `after`.

        Raises:
            JobUnknown, EventUnknown
            NoDataSet: its samples were posted.
        """
        job = self._job(job_id, namespace)
        if after > job.record.last_event:
            raise _event_unknown(job.record, after)
        names = [EntryName("ledger", number) for number in range(after + 1)]
        if names[0] not in job.sizes:
            message = "its samples were posted; post those again of which no group has come"
            raise NoDataSet.of("job_id", message, job_id)
        # The last event may be a summary or a problem.
        return [name for name in names if name in job.sizes]

    def open(self, request: JobRequest, owner: str, body: bytes, time_s: float) -> tuple[OpenedJob, list[Change]]:
        """The job of this key, or a new one.

        Args:
            owner: the ingress replica that plays it if it is new.

        Raises:
            KeyReused: the key was sent with another request.
            JobsFull: there is no room for a new job.
        """
        known = None if request.key is None else self._by_key.get((request.namespace, request.key))
        if known is not None:
            if known.record.fingerprint != request.fingerprint:
                message = "it was sent with another request; send a new key with each new request"
                raise KeyReused.of("header.Idempotency-Key", message, request.key)
            return OpenedJob(known.record, None), []
        self._refuse_if_full(request.namespace, len(body))
        record = JobRecord(**asdict(request), job_id=uuid4().hex, created_at=time_s, owner=owner)
        return OpenedJob(record, Claim(record, (BODY,))), [Change(record.job_id, record, {BODY: body})]

    def acknowledge(self, job_id: str, namespace: str, last: int) -> list[Change]:
        """Events up to `last` need not be kept. Raises `JobUnknown` or `EventUnknown`."""
        record = self.record(job_id, namespace)
        if last > record.last_event:
            raise EventUnknown.of("last", f"the last event is {record.last_event}; acknowledge no more", last)
        if last <= record.acknowledged:
            return []
        removed = [EntryName("event", number) for number in range(record.acknowledged + 1, last + 1)]
        return [Change(job_id, replace(record, acknowledged=last), removed=removed)]

    def delete(self, job_id: str, namespace: str) -> list[Change]:
        """Deletes the job; its owner learns from `poll` that it is lost. Raises `JobUnknown`."""
        return [Change(self.record(job_id, namespace).job_id, None)]

    def delete_key(self, key: str, namespace: str) -> list[Change]:
        """Deletes the job of the key. Raises `JobUnknown`."""
        job = self._by_key.get((namespace, key))
        if job is None:
            message = "no job has this key: none was begun with it, or it was deleted or has expired"
            raise JobUnknown.of("header.Idempotency-Key", message, key)
        return self.delete(job.record.job_id, namespace)

    # Calls of an ingress replica.

    def poll(self, owner: str, playing: Collection[str], now: float) -> JobCommands:
        """Renews the leases of the jobs that the replica plays: each replica that lives polls continually."""
        lost = []
        for job_id in playing:
            if (job := self._owned(owner, job_id)) is None:
                lost.append(job_id)
            else:
                job.heard_at = now
        waiting = (job_id for job_id, job in self._unfinished.items() if job.record.state == "waiting")
        return JobCommands(lost, list(islice(waiting, MOST_OFFERED)))

    def claim(self, job_id: str, owner: str) -> tuple[Claim | None, list[Change]]:
        """`None` if the job does not wait any longer: another replica was first."""
        job = self._jobs.get(job_id)
        if job is None or job.record.state != "waiting":
            return None, []
        record = job.record.given_to(owner)
        return Claim(record, tuple(job.sizes)), [Change(job_id, record)]

    def write(self, owner: str, write: JobWrite, time_s: float) -> Change | None:
        """`None` if the replica must not write to the job. Events that are there already are left out."""
        if (job := self._jobs.get(write.job_id)) is None or job.record.epoch != write.epoch:
            return None
        record = job.record
        if record.has_ended:
            return Change(write.job_id, record) if write.ended else None
        if record.owner != owner:
            return None
        added = {
            name: data for name, data in write.added.items() if name.kind != "event" or name.number > record.last_event
        }
        events = sorted(name.number for name in added if name.kind == "event")
        if events != list(range(record.last_event + 1, record.last_event + 1 + len(events))):
            return None
        record = replace(record, last_event=record.last_event + len(events))
        removed = [name for name in write.removed if name in job.sizes]
        if write.ended:
            record = replace(
                record,
                state=write.ended,
                owner="",
                ended_at=time_s,
                key=None if write.forgets_key else record.key,
                was_refused=write.forgets_key,
            )
            removed = [name for name in job.sizes if name.kind in ONLY_FOR_THE_RUN]
            added = {name: data for name, data in added.items() if name.kind not in ONLY_FOR_THE_RUN}
        return Change(write.job_id, record, added, removed)

    def release(self, owner: str, job_ids: Collection[str]) -> list[Change]:
        """Gives up jobs of a replica that shuts down or has no room for them."""
        mine = [job.record for job_id in job_ids if (job := self._owned(owner, job_id)) is not None]
        return [Change(record.job_id, record.waiting()) for record in mine]

    # Passing time, and what was stored.

    def time_passed(self, now: float, time_s: float) -> list[Change]:
        """Changes that follow from the time alone: jobs that expire, and those whose lease has run out.

        The owner of the latter was lost, or does not play the job: the answer that gave it was lost, or the run broke.
        """
        lost = [
            job.record
            for job in self._unfinished.values()
            if job.record.owner and now - job.heard_at > self._settings.lease_s
        ]
        expired = [Change(job_id, None) for job_id in self._expired(time_s)]
        return [*expired, *(Change(record.job_id, record.waiting()) for record in lost)]

    def commit(self, changes: Iterable[Change], now: float) -> None:
        """Makes changes that were stored."""
        for change in changes:
            job = self._jobs.get(change.job_id)
            if job is not None:
                self._remove(job)
            if change.record is None:
                self._jobs.pop(change.job_id, None)
                continue
            if job is None:
                job = _KeptJob(change.record, heard_at=now)
            if job.record.epoch != change.record.epoch:
                job.heard_at = now
            job.record = change.record
            job.change(change)
            self._add(job)

    def _job(self, job_id: str, namespace: str) -> _KeptJob:
        """Raises `JobUnknown`."""
        job = self._jobs.get(job_id)
        if job is None or job.record.namespace != namespace:
            raise job_unknown(job_id)
        return job

    def _owned(self, owner: str, job_id: str) -> _KeptJob | None:
        job = self._jobs.get(job_id)
        return job if job is not None and job.record.owner == owner else None

    def _expired(self, time_s: float) -> Iterator[str]:
        """Ids of the jobs that have been kept long enough."""
        for jobs, kept_s in ((self._finished, self._settings.keep_s), (self._refused, REFUSED_KEPT_S)):
            for job_id, job in jobs.items():
                if time_s - (job.record.ended_at or 0.0) < kept_s:
                    break
                yield job_id

    def _refuse_if_full(self, namespace: str, body_bytes: int) -> None:
        """Raises `JobsFull` if there is no room for another job with this body."""
        most_bytes, share = self._settings.max_bytes, self._settings.max_share
        added = BYTES_PER_JOB + body_bytes
        _refuse_beyond(most_bytes, self.total_bytes, added, "all callers", "")
        if namespace:
            said = f" x jobs.max_share ({share:g})"
            _refuse_beyond(int(most_bytes * share), self._bytes_of[namespace], added, "this caller", said)

    def _add(self, job: _KeptJob) -> None:
        record = job.record
        self._jobs[record.job_id] = job
        self._place_of(record)[record.job_id] = job
        if record.key is not None:
            self._by_key[record.namespace, record.key] = job
        self._count(job, 1)

    def _remove(self, job: _KeptJob) -> None:
        """Leaves only the job's place among all jobs."""
        record = job.record
        del self._place_of(record)[record.job_id]
        if record.key is not None:
            self._by_key.pop((record.namespace, record.key), None)
        self._count(job, -1)

    def _place_of(self, record: JobRecord) -> dict[str, _KeptJob]:
        if record.ended_at is None:
            return self._unfinished
        return self._refused if record.was_refused else self._finished

    def _count(self, job: _KeptJob, sign: Literal[1, -1]) -> None:
        if not job.record.was_refused:
            self.total_bytes += sign * job.size_bytes
            self._bytes_of[job.record.namespace] += sign * job.size_bytes


def _event_unknown(record: JobRecord, after: int) -> JobFailure:
    return EventUnknown.of("after", f"the last event is {record.last_event}; name it or one before it", after)


def _refuse_beyond(most_bytes: int, kept_bytes: int, added_bytes: int, whose: str, share: str) -> None:
    """Raises `JobsFull`.

    Args:
        share: the caller's share of the bound, in words.
    """
    if kept_bytes + added_bytes > most_bytes:
        message = f"the kept jobs of {whose} take {kept_bytes} bytes and jobs.max_bytes{share} allows {most_bytes}"
        raise JobsFull.of("", f"{message}; acknowledge or delete what you do not need, or try again later")
