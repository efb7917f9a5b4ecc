"""Keeps jobs in Redis, which every node of a cluster can reach."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, WatchError

from deployments.jobs.records import Change, EntryName, LoadedJob
from deployments.jobs.storage import JobStorage, StoreReplaced, record_bytes, record_of, storage_failed


class RedisStorage(JobStorage):
    """Two keys for the service and one for each job, a hash of its entries. What is written is as durable as Redis
    is."""

    def __init__(self, redis: "Redis", prefix: str) -> None:
        self._redis: Any = redis
        self._epoch_key = f"{prefix}:jobs:epoch"
        self._jobs_key = f"{prefix}:jobs"
        self._prefix = f"{prefix}:job:"
        self._epoch = 0

    async def take_over(self) -> list[LoadedJob]:
        with failures_named():
            self._epoch = int(await self._redis.incr(self._epoch_key))
            records = [record_of(data) for data in (await self._redis.hgetall(self._jobs_key)).values()]
            return [LoadedJob(record, await self._sizes(record.job_id)) for record in records]

    async def apply(self, changes: Sequence[Change]) -> None:
        with failures_named():
            await self._apply(changes)

    async def _apply(self, changes: Sequence[Change]) -> None:
        async with self._redis.pipeline(transaction=True) as pipeline:
            # The transaction fails if another store takes over between this look and its end.
            await pipeline.watch(self._epoch_key)
            if int(await pipeline.get(self._epoch_key) or 0) != self._epoch:
                raise StoreReplaced(f"Another job store has taken over from {self._epoch}.")
            pipeline.multi()
            for change in changes:
                self._add(pipeline, change)
            try:
                await pipeline.execute()
            except WatchError as error:
                raise StoreReplaced(f"Another job store has taken over from {self._epoch}.") from error

    async def read(self, job_id: str, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        if not names:
            return {}
        with failures_named():
            found = await self._redis.hmget(self._prefix + job_id, [field_of(name) for name in names])
        return {name: data for name, data in zip(names, found, strict=True) if data is not None}

    async def close(self) -> None:
        await self._redis.aclose()

    async def _sizes(self, job_id: str) -> dict[EntryName, int]:
        fields = await self._redis.hkeys(self._prefix + job_id)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for field in fields:
                pipeline.hstrlen(self._prefix + job_id, field)
            sizes = await pipeline.execute()
        return {name_of(field): size for field, size in zip(fields, sizes, strict=True)}

    def _add(self, pipeline: Any, change: Change) -> None:
        entries = self._prefix + change.job_id
        if change.record is None:
            pipeline.hdel(self._jobs_key, change.job_id)
            pipeline.delete(entries)
            return
        pipeline.hset(self._jobs_key, change.job_id, record_bytes(change.record))
        if change.removed:
            pipeline.hdel(entries, *map(field_of, change.removed))
        if change.added:
            pipeline.hset(entries, mapping={field_of(name): data for name, data in change.added.items()})


@contextmanager
def failures_named() -> Iterator[None]:
    """Raises `StorageFailed` for what Redis and the connection to it raise."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise storage_failed(error) from error


def field_of(name: EntryName) -> str:
    return f"{name.kind}/{name.number}"


def name_of(field: bytes) -> EntryName:
    kind, _, number = field.decode().partition("/")
    return EntryName(kind, int(number))  # type: ignore[arg-type]  # one of those that were written
