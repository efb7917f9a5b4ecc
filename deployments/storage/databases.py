"""The databases of a `Storage`: SQLite on a local disk, or Redis, which every node of a cluster can reach.

`storage_of` opens the one that the settings name. A SQLite database that need not outlive the Ray cluster is in the
cluster's own folder on this machine.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from redis.asyncio import Redis
from redis.exceptions import RedisError, WatchError

from deployments.logs import session_folder
from deployments.storage.storage import (
    EntryName,
    Storage,
    StorageFailed,
    StorageSettings,
    StoredChange,
    StoredRecord,
    StoreKind,
    StoreReplaced,
)


def _store_replaced(kind: StoreKind, epoch: int) -> StoreReplaced:
    return StoreReplaced(f"Another {kind} store has taken over from {epoch}.")


class RedisStorage(Storage):
    """Two keys for the service and one for each record, a hash of its entries. What is written is as durable as Redis
    is."""

    def __init__(self, redis: "Redis", prefix: str, kind: StoreKind) -> None:
        self._redis: Any = redis
        self._kind = kind
        self._epoch_key = f"{prefix}:{kind}s:epoch"
        self._records_key = f"{prefix}:{kind}s"
        self._prefix = f"{prefix}:{kind}:"
        self._epoch = 0

    async def take_over(self) -> list[StoredRecord]:
        with _storage_failures(self._kind):
            self._epoch = int(await self._redis.incr(self._epoch_key))
            records = await self._redis.hgetall(self._records_key)
            names = ((name.decode(), record) for name, record in records.items())
            return [StoredRecord(name, record, await self._sizes(name)) for name, record in names]

    async def apply(self, changes: Sequence[StoredChange]) -> None:
        with _storage_failures(self._kind):
            async with self._redis.pipeline(transaction=True) as pipeline:
                await self._apply(pipeline, changes)

    async def _apply(self, pipeline: Any, changes: Sequence[StoredChange]) -> None:
        # The transaction fails if another store takes over between this check and its end.
        await pipeline.watch(self._epoch_key)
        if int(await pipeline.get(self._epoch_key) or 0) != self._epoch:
            raise _store_replaced(self._kind, self._epoch)
        pipeline.multi()
        for change in changes:
            self._add(pipeline, change)
        try:
            await pipeline.execute()
        except WatchError as error:
            raise _store_replaced(self._kind, self._epoch) from error

    async def read(self, record_id: str, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        if not names:
            return {}
        with _storage_failures(self._kind):
            found = await self._redis.hmget(self._prefix + record_id, [_encode_name(name) for name in names])
        return {name: data for name, data in zip(names, found, strict=True) if data is not None}

    async def _sizes(self, record_id: str) -> dict[EntryName, int]:
        fields = await self._redis.hkeys(self._prefix + record_id)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for field in fields:
                pipeline.hstrlen(self._prefix + record_id, field)
            sizes = await pipeline.execute()
        return {_decode_name(field): size for field, size in zip(fields, sizes, strict=True)}

    def _add(self, pipeline: Any, change: StoredChange) -> None:
        entries = self._prefix + change.record_id
        if change.record is None:
            pipeline.hdel(self._records_key, change.record_id)
            pipeline.delete(entries)
            return
        pipeline.hset(self._records_key, change.record_id, change.record)
        if change.removed:
            pipeline.hdel(entries, *map(_encode_name, change.removed))
        if change.added:
            pipeline.hset(entries, mapping={_encode_name(name): data for name, data in change.added.items()})


@contextmanager
def _storage_failures(kind: StoreKind) -> Iterator[None]:
    """Raises `StorageFailed` for what a database and the connection to it raise.

    Without the library's own message, which may name a path or a host: only the log has it.
    """
    try:
        yield
    except (sqlite3.Error, RedisError, OSError) as error:
        message = f"The database of the {kind}s fails ({type(error).__name__}); the log of the {kind} store says why."
        raise StorageFailed(message) from error


def _encode_name(name: EntryName) -> str:
    return f"{name.kind}/{name.number}"


def _decode_name(field: bytes) -> EntryName:
    kind, _, number = field.decode().partition("/")
    return EntryName(kind, int(number))


def cluster_folder(kind: StoreKind) -> Path:
    """A folder of this Ray cluster on this machine."""
    return session_folder() / f"rollout-{kind}s"


LOCKED_S = 30.0
"""Longest wait of a write for that of a store that this one replaces."""
SCHEMA = """
create table if not exists stores (epoch integer not null);
create table if not exists records (record_id text primary key, record blob not null) without rowid;
create table if not exists entries (
    record_id text not null, kind text not null, number integer not null, data blob not null,
    primary key (record_id, kind, number)
);
"""
Result = TypeVar("Result")


def _file_of(folder: Path, kind: StoreKind) -> Path:
    return folder / f"{kind}s.sqlite"


class SqliteStorage(Storage):
    """Writes are durable when the process dies; after a power cut the last of them may be missing, never half of
    one."""

    def __init__(self, folder: Path, kind: StoreKind) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._kind = kind
        self._path = _file_of(folder, kind)
        # One thread: SQLite's connections belong to the thread that opened them, and writes follow one another.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storage")
        self._database: sqlite3.Connection | None = None
        self._epoch = 0

    async def take_over(self) -> list[StoredRecord]:
        return await self._in_thread(self._take_over)

    async def apply(self, changes: Sequence[StoredChange]) -> None:
        await self._in_thread(lambda: self._apply(changes))

    async def read(self, record_id: str, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        return await self._in_thread(lambda: self._read(record_id, names))

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        with _storage_failures(self._kind):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._database is None:
            database = sqlite3.connect(self._path, timeout=LOCKED_S, isolation_level=None)
            self._path.chmod(0o600)
            database.execute("pragma journal_mode = wal")
            database.execute("pragma synchronous = normal")
            database.executescript(SCHEMA)
            self._database = database
        return self._database

    def _take_over(self) -> list[StoredRecord]:
        database = self._connection
        with _transaction(database):
            [epoch] = database.execute("select coalesce(max(epoch), 0) + 1 from stores").fetchone()
            database.execute("delete from stores")
            database.execute("insert into stores values (?)", (epoch,))
        self._epoch = epoch
        records = database.execute("select record_id, record from records").fetchall()
        sizes: dict[str, dict[EntryName, int]] = {record_id: {} for record_id, _ in records}
        for record_id, kind, number, size in database.execute(
            "select record_id, kind, number, length(data) from entries"
        ):
            sizes[record_id][EntryName(kind, number)] = size
        return [StoredRecord(record_id, record, sizes[record_id]) for record_id, record in records]

    def _apply(self, changes: Sequence[StoredChange]) -> None:
        database = self._connection
        with _transaction(database):
            [epoch] = database.execute("select max(epoch) from stores").fetchone()
            if epoch != self._epoch:
                raise _store_replaced(self._kind, self._epoch)
            for change in changes:
                _apply_change(database, change)

    def _read(self, record_id: str, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        query = "select data from entries where record_id = ? and kind = ? and number = ?"
        found = ((name, self._connection.execute(query, (record_id, *name)).fetchone()) for name in names)
        return {name: row[0] for name, row in found if row is not None}


def _apply_change(database: sqlite3.Connection, change: StoredChange) -> None:
    if change.record is None:
        database.execute("delete from records where record_id = ?", (change.record_id,))
        database.execute("delete from entries where record_id = ?", (change.record_id,))
        return
    database.execute("insert or replace into records values (?, ?)", (change.record_id, change.record))
    removed = [(change.record_id, *name) for name in change.removed]
    database.executemany("delete from entries where record_id = ? and kind = ? and number = ?", removed)
    added = [(change.record_id, *name, data) for name, data in change.added.items()]
    database.executemany("insert or replace into entries values (?, ?, ?, ?)", added)


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Takes the database for writing at once: a transaction that begins to write later can fail there."""
    database.execute("begin immediate")
    try:
        yield
        database.execute("commit")
    except BaseException:
        # SQLite has rolled back itself after some errors, such as a full disk.
        if database.in_transaction:
            database.execute("rollback")
        raise


REDIS_ANSWERS_WITHIN_S = 5.0
"""A Redis that is silent for longer is asked again."""
logger = logging.getLogger("rollout_service.storage")


class _StorageNotUsable(Exception):
    """The settings name no storage that can be used. The message is a sentence."""


def storage_of(settings: StorageSettings, kind: StoreKind) -> Storage:
    """The storage of a store of this kind.

    Raises:
        _StorageNotUsable: the password of the Redis cannot be read; or the cluster has several nodes and the config no
            Redis, unless the folder is there: then this is the node of the store that was here before.
    """
    if settings.redis_url is not None:
        bound_s, password = REDIS_ANSWERS_WITHIN_S, _password_of(settings, kind)
        redis = Redis.from_url(
            settings.redis_url, password=password, socket_timeout=bound_s, socket_connect_timeout=bound_s
        )
        return RedisStorage(redis, settings.redis_prefix, kind)
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    folder = Path(settings.folder).expanduser() if settings.folder else cluster_folder(kind)
    if (count := sum(bool(node["Alive"]) for node in nodes)) > 1:
        message = (
            f"The cluster has {count} nodes, and the {kind} store may be started again on another one, which "
            f"does not have its folder. Set {kind}s.redis_url to a Redis that all nodes reach, or {kind}s: null for a "
            "service without them."
        )
        if not _file_of(folder, kind).exists():
            raise _StorageNotUsable(message)
        logger.warning("%s", message)
    return SqliteStorage(folder, kind)


def _password_of(settings: StorageSettings, kind: StoreKind) -> str | None:
    """The content of the file without the end of its line. Raises `_StorageNotUsable`."""
    if settings.redis_password_file is None:
        return None
    try:
        return Path(settings.redis_password_file).expanduser().read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        field = f"{kind}s.redis_password_file: {settings.redis_password_file!r}"
        reason = getattr(error, "strerror", None) or "is not text"
        raise _StorageNotUsable(f"{field} cannot be read ({reason}). Name a file with the password.") from error
