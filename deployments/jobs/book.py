"""Who plays which job, what is kept of it, and what each call changes. A state machine: no I/O, no clock.

    open -> running -> completed | failed -> (acknowledged, deleted or expired)
            running -> waiting -> running      its ingress replica was lost; the next one has a new epoch
            running -> suspended -> running    nobody listened; the same request was posted again

Guarantees: a key belongs to one request of one caller until its job is gone; at any time at most one owner and epoch
may write to a job; events are numbered from 1 without gaps and none changes; an event is there until it is acknowledged
or its job is gone; a job that has ended takes no further write.

Each method that changes something only says what changes. `commit` makes it so, after it was stored: what is not stored
was never said to anybody.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice, takewhile
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
    refused,
)
from deployments.jobs.leases import Leases
from deployments.jobs.records import (
    Change,
    Claim,
    EntryKind,
    JobRecord,
    JobRequest,
    JobWrite,
    LoadedJob,
    Opened,
    Orders,
)
from deployments.jobs.settings import JobsSettings
from deployments.storage.storage import EntryName

BODY = EntryName("body", 0)
OF_THE_RUN: tuple[EntryKind, ...] = ("body", "journal", "outline")
"""Entries that nobody needs after the end."""
REFUSED_KEPT_S = 60.0
"""A refused job is kept for so long: those who wait for it ask for its events within seconds."""
MOST_OFFERED = 64
"""Waiting jobs that one ingress replica is told of at once."""
PLAYED_WITHIN_S = 5.0
"""After this time an ingress replica names a job that it was given among those that it plays."""


@dataclass(slots=True)
class KeptJob:
    """A job with the sizes of its entries, in bytes."""

    record: JobRecord
    sizes: dict[EntryName, int] = field(default_factory=dict)
    listened_at: float = 0.0
    """When somebody asked for its events last, on the monotonic clock."""
    given_at: float = 0.0
    """When it was given to its owner last, or the store began; on the monotonic clock."""
    size_bytes: int = 0
    """Of all entries."""

    def change(self, change: Change) -> None:
        for name in change.removed:
            self.size_bytes -= self.sizes.pop(name, 0)
        for name, data in change.added.items():
            self.size_bytes += len(data) - self.sizes.get(name, 0)
            self.sizes[name] = len(data)


@dataclass(slots=True)
class Amount:
    """Of kept jobs, without those that were refused."""

    jobs: int = 0
    size_bytes: int = 0


class JobBook:
    """Args: `now` is monotonic, `time_s` counts from 1970; both in seconds, here and in all methods."""

    def __init__(self, settings: JobsSettings, jobs: Iterable[LoadedJob], now: float) -> None:
        self._settings = settings
        self._leases = Leases(settings.lease_s)
        self._jobs: dict[str, KeptJob] = {}
        self._unfinished: dict[str, KeptJob] = {}
        """Those that wait or run."""
        self._finished: dict[str, KeptJob] = {}
        """Those that have ended or are suspended, the first one to expire first."""
        self._refused: dict[str, KeptJob] = {}
        """Those that were refused, the first one to expire first."""
        self._by_key: dict[tuple[str, str], str] = {}
        self._kept = Amount()
        self._kept_of: defaultdict[str, Amount] = defaultdict(Amount)
        """By namespace."""
        for loaded in sorted(jobs, key=lambda job: job.record.ended_at or 0.0):
            job = self._jobs[loaded.record.job_id] = KeptJob(
                loaded.record, dict(loaded.sizes), now, now, sum(loaded.sizes.values())
            )
            self._sort(job)
            self._count(job, 1)
            self._note_key(loaded.record)
            if loaded.record.owner:
                self._leases.heard(loaded.record.owner, now)

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def size_bytes(self) -> int:
        return self._kept.size_bytes

    # What a caller of the service asks.

    def record(self, job_id: str, namespace: str) -> JobRecord:
        """Raises `JobUnknown`."""
        job = self._jobs.get(job_id)
        if job is None or job.record.namespace != namespace:
            raise job_unknown(job_id)
        return job.record

    def records(self, namespace: str) -> list[JobRecord]:
        """The newest first."""
        of_caller = (job.record for job in self._jobs.values() if job.record.namespace == namespace)
        return sorted(of_caller, key=lambda record: record.created_at, reverse=True)

    def note_listener(self, job_id: str, now: float) -> None:
        self._jobs[job_id].listened_at = now

    def events_after(self, job_id: str, namespace: str, after: int, most_bytes: int) -> list[EntryName]:
        """The next events, at least one if there is any, and no more than have `most_bytes`.

        Raises:
            JobUnknown, EventUnknown
            EventsAcknowledged: the events that follow are not kept any longer.
        """
        record = self.record(job_id, namespace)
        if after > record.last_event:
            raise event_unknown(record, after)
        if after < record.acknowledged:
            message = f"events up to {record.acknowledged} were acknowledged; ask for those after it"
            raise refused(EventsAcknowledged, "after", message, after)
        sizes = self._jobs[job_id].sizes
        names: list[EntryName] = []
        size = 0
        for number in range(after + 1, record.last_event + 1):
            size += sizes[EntryName("event", number)]
            if names and size > most_bytes:
                break
            names.append(EntryName("event", number))
        return names

    def ledger(self, job_id: str, namespace: str, after: int) -> list[EntryName]:
        """What is kept of the groups in the events up to `after`.

        Raises:
            JobUnknown, EventUnknown
            NoDataSet: its samples were posted.
        """
        record = self.record(job_id, namespace)
        if after > record.last_event:
            raise event_unknown(record, after)
        sizes = self._jobs[job_id].sizes
        names = [EntryName("ledger", number) for number in range(after + 1)]
        if names[0] not in sizes:
            message = "its samples were posted; post those again of which no group has come"
            raise refused(NoDataSet, "job_id", message, job_id)
        # The last event may be a summary or a problem.
        return [name for name in names if name in sizes]

    def open(
        self, request: JobRequest, owner: str, body: bytes, now: float, time_s: float
    ) -> tuple[Opened, list[Change]]:
        """The job of this key, which goes on if it was suspended, or a new one.

        Args:
            owner: the ingress replica that plays it if it is new or suspended.

        Raises:
            KeyReused: the key was sent with another request.
            JobsFull: there is no room for a new job.
        """
        self._leases.heard(owner, now)
        known = self._by_key.get((request.namespace, request.key)) if request.key is not None else None
        if known is not None:
            return self._attach(self._jobs[known], request, owner, now, time_s)
        self._refuse_if_full(request.namespace, len(body))
        record = JobRecord(**asdict(request), job_id=uuid4().hex, created_at=time_s, owner=owner, played_until=time_s)
        return Opened(record, Claim(record, (BODY,))), [Change(record.job_id, record, {BODY: body})]

    def acknowledge(self, job_id: str, namespace: str, last: int) -> list[Change]:
        """Events up to `last` need not be kept. Raises `JobUnknown` or `EventUnknown`."""
        record = self.record(job_id, namespace)
        if last > record.last_event:
            raise refused(EventUnknown, "last", f"the last event is {record.last_event}; acknowledge no more", last)
        if last <= record.acknowledged:
            return []
        removed = [EntryName("event", number) for number in range(record.acknowledged + 1, last + 1)]
        return [Change(job_id, replace(record, acknowledged=last), removed=removed)]

    def delete(self, job_id: str, namespace: str) -> list[Change]:
        """Its owner learns from `orders` that it is lost. Raises `JobUnknown`."""
        return [Change(self.record(job_id, namespace).job_id, None)]

    def delete_key(self, key: str, namespace: str) -> list[Change]:
        """Deletes the job of the key. Raises `JobUnknown`."""
        job_id = self._by_key.get((namespace, key))
        if job_id is None:
            message = "no job has this key: none was begun with it, or it was deleted or has expired"
            raise refused(JobUnknown, "header.Idempotency-Key", message, key)
        return self.delete(job_id, namespace)

    # What an ingress replica asks.

    def orders(self, owner: str, playing: Collection[str], now: float) -> Orders:
        """Is asked every moment by each replica that lives: this is what keeps its lease."""
        self._leases.heard(owner, now)
        lost = [job_id for job_id in playing if not self._is_owner(owner, job_id)]
        waiting = (job_id for job_id, job in self._unfinished.items() if job.record.state == "waiting")
        return Orders(lost, list(islice(waiting, MOST_OFFERED)))

    def unplayed(self, owner: str, playing: Collection[str], now: float) -> list[str]:
        """Jobs that the replica owns and does not play: the answer that gave them to it was lost, or they broke off."""
        return [
            job_id
            for job_id, job in self._unfinished.items()
            if job.record.owner == owner and job_id not in playing and now - job.given_at > PLAYED_WITHIN_S
        ]

    def claim(self, job_id: str, owner: str, now: float, time_s: float) -> tuple[Claim | None, list[Change]]:
        """`None` if the job does not wait any longer: another replica was first."""
        job = self._jobs.get(job_id)
        if job is None or job.record.state != "waiting":
            return None, []
        self._leases.heard(owner, now)
        record = job.record.given_to(owner, time_s)
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
        record = replace(record.played(time_s), last_event=record.last_event + len(events))
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
            removed = [name for name in job.sizes if name.kind in OF_THE_RUN]
            added = {name: data for name, data in added.items() if name.kind not in OF_THE_RUN}
        return Change(write.job_id, record, added, removed)

    def release(self, owner: str, job_ids: Collection[str], were_played: bool, time_s: float) -> list[Change]:
        """The replica gives these jobs up: it shuts down, or it has not played them, having no room for them."""
        mine = [self._jobs[job_id].record for job_id in job_ids if self._is_owner(owner, job_id)]
        return [Change(each.job_id, (each.played(time_s) if were_played else each).waiting()) for each in mine]

    # What time changes.

    def passed(self, now: float, time_s: float) -> list[Change]:
        """What follows from the time alone: lost owners, abandoned and expired jobs."""
        lost = set(self._leases.lost(now))
        # Not before the end of their leases is stored.
        self._leases.forget(lost - {job.record.owner for job in self._unfinished.values()})
        old = [
            Change(job.record.job_id, None)
            for jobs, kept_s in ((self._finished, self._settings.keep_s), (self._refused, REFUSED_KEPT_S))
            for job in takewhile(partial(is_old, time_s, kept_s), jobs.values())
        ]
        unfinished = (self._passed(job, lost, now, time_s) for job in self._unfinished.values())
        return [*old, *(change for change in unfinished if change is not None)]

    def _passed(self, job: KeptJob, lost: Collection[str], now: float, time_s: float) -> Change | None:
        record = job.record
        is_abandoned = not record.runs_alone and now - job.listened_at > self._settings.abandoned_after_s
        if not is_abandoned and record.owner not in lost:
            return None
        heard_at = self._leases.heard_at(record.owner)
        # A store that began after its owner had died has never heard of it, and knows when it wrote last.
        if heard_at > job.given_at:
            record = record.played(time_s - (now - heard_at))
        return Change(record.job_id, record.suspended(time_s) if is_abandoned else record.waiting())

    # What was stored.

    def commit(self, changes: Iterable[Change], now: float) -> None:
        for change in changes:
            job = self._jobs.get(change.job_id)
            if change.record is None:
                if job is not None:
                    self._forget(job)
                continue
            if job is None:
                job = self._jobs[change.job_id] = KeptJob(change.record, {}, now, now)
            else:
                self._count(job, -1)
            if job.record.epoch != change.record.epoch:
                job.given_at = now
            self._forget_key(job.record)
            job.record = change.record
            self._note_key(change.record)
            self._sort(job)
            job.change(change)
            self._count(job, 1)

    def names(self, job_id: str) -> Sequence[EntryName]:
        """Of all entries of a job."""
        job = self._jobs.get(job_id)
        return () if job is None else tuple(job.sizes)

    def _attach(
        self, job: KeptJob, request: JobRequest, owner: str, now: float, time_s: float
    ) -> tuple[Opened, list[Change]]:
        record = job.record
        if (record.kind, record.fingerprint) != (request.kind, request.fingerprint):
            message = "it was sent with another request; send a new key with each new request"
            raise refused(KeyReused, "header.Idempotency-Key", message, request.key)
        job.listened_at = now
        attached = replace(record, runs_alone=record.runs_alone or request.runs_alone)
        if record.state != "suspended":
            return Opened(attached, None), [] if attached == record else [Change(record.job_id, attached)]
        record = attached.given_to(owner, time_s)
        return Opened(record, Claim(record, tuple(job.sizes))), [Change(record.job_id, record)]

    def _refuse_if_full(self, namespace: str, body_bytes: int) -> None:
        settings = self._settings
        refuse_beyond(self._kept, body_bytes, settings.max_jobs, settings.max_bytes, "all callers", "")
        if namespace:
            share = settings.max_share
            most_jobs, most_bytes = max(int(settings.max_jobs * share), 1), int(settings.max_bytes * share)
            share_said = f" x jobs.max_share ({share:g})"
            refuse_beyond(self._kept_of[namespace], body_bytes, most_jobs, most_bytes, "this caller", share_said)

    def _is_owner(self, owner: str, job_id: str) -> bool:
        job = self._jobs.get(job_id)
        return job is not None and job.record.owner == owner

    def _sort(self, job: KeptJob) -> None:
        job_id = job.record.job_id
        for jobs in (self._unfinished, self._finished, self._refused):
            jobs.pop(job_id, None)
        if job.record.ended_at is None:
            place = self._unfinished
        else:
            place = self._refused if job.record.was_refused else self._finished
        place[job_id] = job

    def _count(self, job: KeptJob, sign: Literal[1, -1]) -> None:
        if job.record.was_refused:
            return
        for amount in (self._kept, self._kept_of[job.record.namespace]):
            amount.jobs += sign
            amount.size_bytes += sign * job.size_bytes

    def _forget(self, job: KeptJob) -> None:
        for jobs in (self._jobs, self._unfinished, self._finished, self._refused):
            jobs.pop(job.record.job_id, None)
        self._count(job, -1)
        self._forget_key(job.record)

    def _note_key(self, record: JobRecord) -> None:
        if record.key is not None:
            self._by_key[record.namespace, record.key] = record.job_id

    def _forget_key(self, record: JobRecord) -> None:
        if record.key is not None:
            self._by_key.pop((record.namespace, record.key), None)


def is_old(time_s: float, kept_s: float, job: KeptJob) -> bool:
    ended_at = job.record.ended_at
    return ended_at is not None and time_s - ended_at >= kept_s


def refuse_beyond(kept: Amount, body_bytes: int, most_jobs: int, most_bytes: int, whose: str, share: str) -> None:
    """Raises `JobsFull`. Args: `share` is what is said of the caller's share of the settings."""
    if kept.jobs >= most_jobs:
        message = f"{kept.jobs} jobs of {whose} are kept and jobs.max_jobs{share} allows {most_jobs}"
        raise refused(JobsFull, "", f"{message}; delete those that you do not need, or try again later")
    if kept.size_bytes + body_bytes > most_bytes:
        message = f"the kept jobs of {whose} have {kept.size_bytes} bytes and jobs.max_bytes{share} allows {most_bytes}"
        raise refused(JobsFull, "", f"{message}; acknowledge or delete what you do not need, or try again later")


def event_unknown(record: JobRecord, after: int) -> JobFailure:
    return refused(EventUnknown, "after", f"the last event is {record.last_event}; name it or one before it", after)
