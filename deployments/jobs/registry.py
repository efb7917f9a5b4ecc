"""Who plays which job, what is kept of it, and what each call changes. A state machine: no I/O, no clock.

`JobsSettings` says where requests with an `Idempotency-Key` and jobs are kept, and for how long.

    open -> running -> completed | failed -> (acknowledged, deleted or expired)
            running -> (refused: nothing was played, and its key is free)
            running -> waiting -> running      its ingress replica was lost; the next one has a new epoch

Guarantees: a key belongs to one request of one caller until its job is gone; at any time at most one owner and epoch
may write to a job; events are numbered from 1 without gaps and none changes; an event is there until it is acknowledged
or its job is gone; a job that has ended takes no further write.

Each method that changes something only returns the changes. `commit` makes them after they were stored: nothing is
reported to a caller before it is stored.
"""

from collections import ChainMap, Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, takewhile
from uuid import uuid4

from pydantic import Field

from deployments.jobs.records import (
    BODY,
    Change,
    Claim,
    EntryKind,
    EventsAcknowledged,
    EventUnknown,
    JobCommands,
    JobRecord,
    JobRequest,
    JobsFull,
    JobUnknown,
    JobWrite,
    KeyReused,
    NoDataSet,
    OpenedJob,
    decode_record,
)
from deployments.storage.storage import EntryName, StorageSettings, StoredRecord

GIB = 2**30


class JobsSettings(StorageSettings):
    keep_s: float = Field(default=86_400, gt=0)
    """A job that has ended is forgotten after so many seconds, with the groups that nobody has acknowledged."""
    max_bytes: int = Field(default=16 * GIB, ge=1)
    """Bound of all jobs together: compressed bodies, journals and unacknowledged groups, and 64 KiB for each job. At
    this bound new jobs are refused with 429; those that run go on."""
    max_share: float = Field(default=0.5, gt=0, le=1)
    """Share of `max_bytes` that the jobs of one caller may take. Where nobody needs a key, all callers
    are one."""
    max_body_bytes: int = Field(default=64 * 2**20, ge=1)
    """A larger body is refused with 413: name samples of a task with `samples_from`, or split it."""
    lease_s: float = Field(default=5, gt=0)
    """An ingress replica that was not heard of for so many seconds has lost its jobs, and another one goes on with
    them."""


ONLY_FOR_THE_RUN: tuple[EntryKind, ...] = ("body", "journal", "outline")
"""Entries that are removed at the end."""
MOST_OFFERED = 8
"""Waiting jobs that one ingress replica is told of at once: it claims them before its next poll."""
BYTES_PER_JOB = 2**16
"""Room that each job takes beside its entries: `max_bytes` bounds how many small jobs are kept."""


@dataclass(slots=True)
class _KeptJob:
    """A job with the sizes of its entries, in bytes. Times are on the monotonic clock."""

    record: JobRecord
    sizes: dict[EntryName, int] = field(default_factory=dict)
    heard_at: float = 0.0
    """When its owner was given it or last said that it plays it, or the store began."""
    size_bytes: int = BYTES_PER_JOB
    """The room that it takes."""

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
        self._unfinished: dict[str, _KeptJob] = {}
        """Jobs that wait or run, by id."""
        self._finished: dict[str, _KeptJob] = {}
        """Jobs that have ended, the first one to expire first."""
        self._jobs = ChainMap(self._unfinished, self._finished)
        self._by_key: dict[tuple[str, str], _KeptJob] = {}
        self._bytes_of: Counter[str] = Counter()
        """By namespace."""
        loaded = ((decode_record(each.record), each.sizes) for each in stored)
        for record, sizes in sorted(loaded, key=lambda pair: pair[0].ended_at or 0.0):
            # The absence of the store counts against no owner: each lease begins now.
            self._add(_KeptJob(record, dict(sizes), now, BYTES_PER_JOB + sum(sizes.values())))

    @property
    def total_bytes(self) -> int:
        return self._bytes_of.total()

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
        _check_event(record, after, "after")
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
        _check_event(job.record, after, "after")
        names = [EntryName("ledger", number) for number in range(after + 1)]
        if names[0] not in job.sizes:
            message = "its samples were posted; post those again of which no group has come"
            raise NoDataSet.of("job_id", message, job_id)
        # A group that has failed has none, and neither has a summary or a problem.
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
        _check_event(record, last, "last")
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
            message = "no job has this key: none was begun with it, or it was refused, was deleted or has expired"
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
        record = replace(job.record, state="running", owner=owner, epoch=job.record.epoch + 1)
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
        if write.ended == "refused":
            return Change(write.job_id, None)
        added = {
            name: data for name, data in write.added.items() if name.kind != "event" or name.number > record.last_event
        }
        events = sorted(name.number for name in added if name.kind == "event")
        if events != list(range(record.last_event + 1, record.last_event + 1 + len(events))):
            return None
        record = replace(record, last_event=record.last_event + len(events))
        removed = [name for name in write.removed if name in job.sizes]
        if write.ended:
            record = replace(record, state=write.ended, owner="", ended_at=time_s)
            removed = [name for name in job.sizes if name.kind in ONLY_FOR_THE_RUN]
            added = {name: data for name, data in added.items() if name.kind not in ONLY_FOR_THE_RUN}
        return Change(write.job_id, record, added, removed)

    def release(self, owner: str, job_ids: Collection[str]) -> list[Change]:
        """Gives up jobs of a replica that shuts down or has no room for them."""
        return [_given_up(job.record) for job_id in job_ids if (job := self._owned(owner, job_id)) is not None]

    # Passing time, and what was stored.

    def time_passed(self, now: float, time_s: float) -> list[Change]:
        """Changes that follow from the time alone: jobs that expire, and those whose lease has run out.

        The owner of the latter was lost, or does not play the job: the answer that gave it was lost, or the run broke.
        """
        records = (job.record for job in self._finished.values())
        expired = takewhile(lambda record: time_s - (record.ended_at or 0.0) >= self._settings.keep_s, records)
        lost = [
            job.record
            for job in self._unfinished.values()
            if job.record.owner and now - job.heard_at > self._settings.lease_s
        ]
        return [*(Change(record.job_id, None) for record in expired), *map(_given_up, lost)]

    def commit(self, changes: Iterable[Change], now: float) -> None:
        """Makes changes that were stored."""
        for change in changes:
            job = self._removed(change.job_id)
            if change.record is None:
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
            message = "there is no such job: it was refused or deleted, it has expired, or it is another caller's"
            raise JobUnknown.of("job_id", message, job_id)
        return job

    def _owned(self, owner: str, job_id: str) -> _KeptJob | None:
        job = self._unfinished.get(job_id)
        return job if job is not None and job.record.owner == owner else None

    def _refuse_if_full(self, namespace: str, body_bytes: int) -> None:
        """Raises `JobsFull` if there is no room for another job with this body."""
        most_bytes, share = self._settings.max_bytes, self._settings.max_share
        bounds = [("all callers", "", most_bytes, self.total_bytes)]
        if namespace:
            said = f" x jobs.max_share ({share:g})"
            bounds.append(("this caller", said, int(most_bytes * share), self._bytes_of[namespace]))
        for whose, share_text, bound, kept_bytes in bounds:
            if kept_bytes + BYTES_PER_JOB + body_bytes > bound:
                message = f"the kept jobs of {whose} take {kept_bytes} bytes and jobs.max_bytes{share_text} allows"
                advice = "acknowledge or delete what you do not need, or try again later"
                raise JobsFull.of("", f"{message} {bound}; {advice}")

    def _add(self, job: _KeptJob) -> None:
        record = job.record
        jobs = self._unfinished if record.ended_at is None else self._finished
        jobs[record.job_id] = job
        if record.key is not None:
            self._by_key[record.namespace, record.key] = job
        self._bytes_of[record.namespace] += job.size_bytes

    def _removed(self, job_id: str) -> _KeptJob | None:
        """Removes the job, if there is one."""
        job = self._unfinished.pop(job_id, None) or self._finished.pop(job_id, None)
        if job is not None:
            self._bytes_of[job.record.namespace] -= job.size_bytes
            if job.record.key is not None:
                del self._by_key[job.record.namespace, job.record.key]
        return job


def _given_up(record: JobRecord) -> Change:
    """Another replica may claim the job."""
    return Change(record.job_id, replace(record, state="waiting", owner=""))


def _check_event(record: JobRecord, number: int, field: str) -> None:
    """Raises `EventUnknown`."""
    if number > record.last_event:
        raise EventUnknown.of(field, f"the last event is {record.last_event}; name it or one before it", number)
