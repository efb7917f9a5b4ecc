"""The records of the job store, the messages between it and the ingress, and how it refuses a call.

The ingress answers refusals with problem documents.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

import orjson

from deployments.failures import StoreFailure
from deployments.storage.storage import EntryName, StoredChange
from rollout_client.contract.jobs import JobState

Ended = Literal["completed", "failed", "refused"]
"""How a run ends; a job that is refused is forgotten with its key, because nothing of it was played."""
EntryKind = Literal["body", "journal", "outline", "event", "ledger"]
"""`body`: the request, number 0; `journal`: finished turns of rollouts that are in no event; `outline`: what the
summary needs of the rollouts of an event; `event`: groups that have ended and, as the last one, the summary or the
problem; `ledger`: of a job over a data set, number 0 its ranges, each other one the place of the group of the event of
this number, which stays when the event was acknowledged; a group that has failed has none."""


BODY = EntryName("body", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """Asks for a job: a new one, or the one of the same key. Its body travels beside it."""

    namespace: str
    """The caller: jobs and keys of others are unknown to it."""
    request_id: str
    key: str | None = None
    """The `Idempotency-Key`, if there is one."""
    fingerprint: str = ""
    """The hash of the request: a key belongs to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(JobRequest):
    """One job without its entries. Times are seconds since 1970, by the store's clock."""

    job_id: str
    created_at: float
    state: JobState = "running"
    owner: str = ""
    """The ingress replica that plays it; empty unless it runs."""
    epoch: int = 1
    """Counts how often it was given to an ingress replica: writes of an earlier one are refused."""
    last_event: int = 0
    """Events are numbered from 1 without gaps."""
    acknowledged: int = 0
    """Events up to this one are not kept."""
    ended_at: float | None = None

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one job. A store makes all changes of one call, or none."""

    job_id: str
    record: JobRecord | None
    """`None` removes the job with all its entries."""
    added: Mapping[EntryName, bytes] = field(default_factory=dict)
    removed: Collection[EntryName] = ()

    @property
    def stored(self) -> StoredChange:
        record = None if self.record is None else _encode_record(self.record)
        return StoredChange(self.job_id, record, self.added, self.removed)


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to play a job, until another ingress replica has it."""

    record: JobRecord
    entries: Sequence[EntryName]
    """The names of its entries."""


@dataclass(frozen=True, slots=True)
class OpenedJob:
    record: JobRecord
    claim: Claim | None
    """Given to the caller, which must play the job; `None` if another ingress replica plays it, or it has ended."""


@dataclass(frozen=True, slots=True)
class JobWrite:
    """A write of the ingress replica that plays a job. Repeated, it changes nothing."""

    job_id: str
    epoch: int
    added: Mapping[EntryName, bytes] = field(default_factory=dict)
    """Events have the numbers that follow `JobRecord.last_event`."""
    removed: Collection[EntryName] = ()
    ended: Ended | None = None
    """Set with the last event, or of a job that is refused without one."""


@dataclass(frozen=True, slots=True)
class JobCommands:
    """The answer to a poll of an ingress replica."""

    lost: Collection[str] = ()
    """Jobs that it plays and must not play any longer."""
    waiting: Sequence[str] = ()
    """Jobs that it may claim."""


@dataclass(frozen=True, slots=True)
class EventsPage:
    record: JobRecord
    events: Sequence[tuple[int, bytes]]
    """With their numbers, in order; empty if none came in time."""


def _encode_record(record: JobRecord) -> bytes:
    return orjson.dumps(asdict(record))


def decode_record(data: bytes) -> JobRecord:
    """Fields that this version does not know are ignored."""
    stored = orjson.loads(data)
    return JobRecord(**{field.name: stored[field.name] for field in fields(JobRecord) if field.name in stored})


class JobFailure(StoreFailure):
    """A call of the job store was not carried out."""


class JobUnknown(JobFailure):
    """The job never was, is another caller's, was deleted, or has expired."""

    status = 404
    name = "job-unknown"
    title = "The job is not known"


class KeyReused(JobFailure):
    """The key was sent before, with another request."""

    name = "idempotency-key-reused"
    title = "The Idempotency-Key belongs to another request; nothing was started"


class EventsAcknowledged(JobFailure):
    """Events that were acknowledged are not kept."""

    status = 410
    name = "events-acknowledged"
    title = "These events were acknowledged and are not kept"


class EventUnknown(JobFailure):
    """There is no event of this number yet."""

    name = "event-unknown"
    title = "The job has no such event"


class NoDataSet(JobFailure):
    """The job plays samples that were posted. Only a job over `samples_from` has a ledger."""

    name = "job-without-data-set"
    title = "The job has no data set, and so no cursor"


class JobsFull(JobFailure):
    """The jobs that are kept leave no room for another one."""

    status = 429
    name = "jobs-full"
    title = "The kept jobs leave no room for another one; nothing was started"
    # Kept jobs go when they are acknowledged, deleted or old.
    retry_after_s = 30


class JobsNotConfigured(JobFailure):
    """The config has no `jobs`."""

    status = 501
    name = "jobs-not-configured"
    title = "The service keeps no jobs"
