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

from deployments.storage.settings import StorageSettings
from deployments.storage.storage import (
    EntryName,
    Noun,
    Storage,
    StoredChange,
    StoredRecord,
    storage_failed,
    store_replaced,
)


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


def cluster_folder(noun: Noun) -> Path:
    """A folder of this Ray cluster on this machine."""
    return session_folder() / f"rollout-{noun}s"


def session_folder() -> Path:
    """Where Ray keeps what is of this cluster on this machine: logs, sockets."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name()


LOCKED_S = 30.0
"""How long a write waits for the one of a store that this one replaces."""
SCHEMA = """
create table if not exists stores (epoch integer not null);
create table if not exists records (record_id text primary key, record blob not null) without rowid;
create table if not exists entries (
    record_id text not null, kind text not null, number integer not null, data blob not null,
    primary key (record_id, kind, number)
);
"""
Result = TypeVar("Result")


def file_of(folder: Path, noun: Noun) -> Path:
    return folder / f"{noun}s.sqlite"


class SqliteStorage(Storage):
    """Writes are durable when the process dies; after a power cut the last of them may be missing, never half of
    one."""

    def __init__(self, folder: Path, noun: Noun) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._noun = noun
        self._path = file_of(folder, noun)
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

    async def close(self) -> None:
        await self._in_thread(self._connection.close)
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, OSError) as error:
            raise storage_failed(self._noun, error) from error

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
        with Transaction(database):
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
        with Transaction(database):
            [epoch] = database.execute("select max(epoch) from stores").fetchone()
            if epoch != self._epoch:
                raise store_replaced(self._noun, self._epoch)
            for change in changes:
                apply_change(database, change)

    def _read(self, record_id: str, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        query = "select data from entries where record_id = ? and kind = ? and number = ?"
        found = ((name, self._connection.execute(query, (record_id, *name)).fetchone()) for name in names)
        return {name: row[0] for name, row in found if row is not None}


def apply_change(database: sqlite3.Connection, change: StoredChange) -> None:
    if change.record is None:
        database.execute("delete from records where record_id = ?", (change.record_id,))
        database.execute("delete from entries where record_id = ?", (change.record_id,))
        return
    database.execute("insert or replace into records values (?, ?)", (change.record_id, change.record))
    removed = [(change.record_id, *name) for name in change.removed]
    database.executemany("delete from entries where record_id = ? and kind = ? and number = ?", removed)
    added = [(change.record_id, *name, data) for name, data in change.added.items()]
    database.executemany("insert or replace into entries values (?, ?, ?, ?)", added)


class Transaction:
    """Takes the database for writing at once: a transaction that begins to write later can fail there."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("begin immediate")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._roll_back()
            return
        try:
            self._database.execute("commit")
        except sqlite3.Error:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        # SQLite has done so itself after some errors, such as a full disk.
        if self._database.in_transaction:
            self._database.execute("rollback")


REDIS_ANSWERS_WITHIN_S = 5.0
"""A Redis that is silent for longer is asked again."""
WITHOUT: dict[Noun, str] = {
    "job": "jobs: null for a service that refuses jobs and Idempotency-Keys",
    "session": "sessions: null for a service without sessions",
}
logger = logging.getLogger("rollout_service.storage")


class PasswordUnreadable(Exception):
    """There is no password in `redis_password_file`. The message is a sentence."""


class FolderNotShared(Exception):
    """The cluster has several nodes, and the config no Redis. The message is a sentence."""


def storage_of(settings: StorageSettings, noun: Noun) -> Storage:
    """The storage of a store of this kind.

    Raises:
        FolderNotShared: the cluster has several nodes and the config no Redis, unless the folder is there: then this is
            the node of the store that was here before.
        PasswordUnreadable: the password of the Redis cannot be read.
    """
    if settings.redis_url is not None:
        bound_s, password = REDIS_ANSWERS_WITHIN_S, password_of(settings, noun)
        redis = Redis.from_url(
            settings.redis_url, password=password, socket_timeout=bound_s, socket_connect_timeout=bound_s
        )
        return RedisStorage(redis, settings.redis_prefix, noun)
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    folder = Path(settings.folder).expanduser() if settings.folder else cluster_folder(noun)
    if (count := sum(bool(node["Alive"]) for node in nodes)) > 1:
        message = (
            f"The cluster has {count} nodes, and the {noun} store may be started again on another one, which has not "
            f"its folder. Set {noun}s.redis_url to a Redis that all nodes reach, or {WITHOUT[noun]}."
        )
        if not file_of(folder, noun).exists():
            raise FolderNotShared(message)
        logger.warning("%s", message)
    return SqliteStorage(folder, noun)


def password_of(settings: StorageSettings, noun: Noun) -> str | None:
    """The content of the file, but for the end of its line. Raises `PasswordUnreadable`."""
    if settings.redis_password_file is None:
        return None
    field = f"{noun}s.redis_password_file: {settings.redis_password_file!r}"
    try:
        password = Path(settings.redis_password_file).expanduser().read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise PasswordUnreadable(f"{field} cannot be read ({reason}). Name a file with the password.") from error
    if not password:
        raise PasswordUnreadable(f"{field} is empty. Write the password of the Redis into it.")
    return password
