"""Keeps records in a SQLite database on a local disk."""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from deployments.storage.records import EntryName, StoredChange, StoredRecord
from deployments.storage.storage import Noun, Storage, storage_failed, store_replaced

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
