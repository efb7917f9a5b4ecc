"""Keeps records in Redis, which every node of a cluster can reach."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, WatchError

from deployments.storage.records import EntryName, StoredChange, StoredRecord
from deployments.storage.storage import Noun, Storage, storage_failed, store_replaced


class RedisStorage(Storage):
    """Two keys for the service and one for each record, a hash of its entries. What is written is as durable as Redis
    is."""

    def __init__(self, redis: "Redis", prefix: str, noun: Noun) -> None:
        self._redis: Any = redis
        self._noun = noun
        self._epoch_key = f"{prefix}:{noun}s:epoch"
        self._records_key = f"{prefix}:{noun}s"
        self._prefix = f"{prefix}:{noun}:"
        self._epoch = 0

    async def take_over(self) -> list[StoredRecord]:
        with failures_named(self._noun):
            self._epoch = int(await self._redis.incr(self._epoch_key))
            records = await self._redis.hgetall(self._records_key)
            names = ((name.decode(), record) for name, record in records.items())
            return [StoredRecord(name, record, await self._sizes(name)) for name, record in names]

    async def apply(self, changes: Sequence[StoredChange]) -> None:
        with failures_named(self._noun):
            await self._apply(changes)

    async def _apply(self, changes: Sequence[StoredChange]) -> None:
        async with self._redis.pipeline(transaction=True) as pipeline:
            # The transaction fails if another store takes over between this look and its end.
            await pipeline.watch(self._epoch_key)
            if int(await pipeline.get(self._epoch_key) or 0) != self._epoch:
                raise store_replaced(self._noun, self._epoch)
            pipeline.multi()
            for change in changes:
                self._add(pipeline, change)
            try:
                await pipeline.execute()
            except WatchError as error:
                raise store_replaced(self._noun, self._epoch) from error

    async def read(self, record_id: str, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        if not names:
            return {}
        with failures_named(self._noun):
            found = await self._redis.hmget(self._prefix + record_id, [field_of(name) for name in names])
        return {name: data for name, data in zip(names, found, strict=True) if data is not None}

    async def close(self) -> None:
        await self._redis.aclose()

    async def _sizes(self, record_id: str) -> dict[EntryName, int]:
        fields = await self._redis.hkeys(self._prefix + record_id)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for field in fields:
                pipeline.hstrlen(self._prefix + record_id, field)
            sizes = await pipeline.execute()
        return {name_of(field): size for field, size in zip(fields, sizes, strict=True)}

    def _add(self, pipeline: Any, change: StoredChange) -> None:
        entries = self._prefix + change.record_id
        if change.record is None:
            pipeline.hdel(self._records_key, change.record_id)
            pipeline.delete(entries)
            return
        pipeline.hset(self._records_key, change.record_id, change.record)
        if change.removed:
            pipeline.hdel(entries, *map(field_of, change.removed))
        if change.added:
            pipeline.hset(entries, mapping={field_of(name): data for name, data in change.added.items()})


@contextmanager
def failures_named(noun: Noun) -> Iterator[None]:
    """Raises `StorageFailed` for what Redis and the connection to it raise."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise storage_failed(noun, error) from error


def field_of(name: EntryName) -> str:
    return f"{name.kind}/{name.number}"


def name_of(field: bytes) -> EntryName:
    kind, _, number = field.decode().partition("/")
    return EntryName(kind, int(number))
