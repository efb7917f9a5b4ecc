"""Where the job store keeps its jobs: `JobStorage`. `SqliteStorage` and `RedisStorage` implement it."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Protocol

import orjson

from deployments.failures import JobStoreLost
from deployments.jobs.records import Change, EntryName, JobRecord, LoadedJob


class StoreReplaced(JobStoreLost):
    """A newer job store has taken the jobs over: this one must end."""


class StorageFailed(JobStoreLost):
    """The database did not do what it was asked. The same can succeed later: there is no room, or it is away."""


def storage_failed(error: Exception) -> StorageFailed:
    """What the library says is for the log alone: it may name a path or a host."""
    return StorageFailed(f"The database of the jobs fails ({type(error).__name__}); the log of the job store says why.")


class JobStorage(Protocol):
    """One store at a time writes: the last one that has called `take_over`.

    Each call raises `StorageFailed`, whose cause is what the database's library raised.
    """

    async def take_over(self) -> list[LoadedJob]:
        """All jobs that are kept. What an earlier store writes from now on raises `StoreReplaced`."""
        ...

    async def apply(self, changes: Sequence[Change]) -> None:
        """Makes all changes, or none. Returns when they outlive this process. Raises `StoreReplaced`.

        After `StorageFailed` nobody knows whether they were made; made again, they change nothing the second time.
        """
        ...

    async def read(self, job_id: str, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        """The entries that exist, by their names."""
        ...

    async def close(self) -> None: ...


def record_bytes(record: JobRecord) -> bytes:
    return orjson.dumps(asdict(record))


def record_of(data: bytes) -> JobRecord:
    """Fields that this version does not know are ignored."""
    stored = orjson.loads(data)
    return JobRecord(**{field.name: stored[field.name] for field in fields(JobRecord) if field.name in stored})
