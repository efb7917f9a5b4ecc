"""Crashes of the machine: a version is current only if all of it is on disk."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deployments.policy.durable_files import write_durably
from deployments.policy.uploads import Uploads
from deployments.policy.versions import InitialVersion, Version, Versions, read_index
from tests.deployments.policy.crashing_disk import CrashingDisk
from tests.paths import TINY_MODEL


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CrashingDisk]:
    (tmp_path / "disk").mkdir()
    disk = CrashingDisk(tmp_path / "disk")
    disk.install(monkeypatch)
    yield disk
    monkeypatch.undo()
    disk.close()


def info(version: int) -> Version:
    created_at = datetime(2026, 1, 1, tzinfo=UTC)
    return Version(version=version, kind="full", key="key", created_at=created_at, checksum="c" * 64)


def versions_in(folder: Path) -> Versions:
    return Versions(folder, InitialVersion(str(TINY_MODEL), folder))


def weights_of(version: int) -> bytes:
    return b"weights of %d" % version


async def add(versions: Versions, version: int) -> None:
    content = weights_of(version)
    uploads = Uploads(versions, ())
    await uploads.write(version, None, 0, content)
    async with versions.adding(info(version), uploads.path(version)):
        versions.make_current(info(version))


def current_of(folder: Path) -> int:
    """Asserts that what is current there is whole."""
    index = read_index(folder)
    if index.current:
        assert index.versions[index.current] == info(index.current)
        assert (folder / "versions" / f"{index.current}.safetensors").read_bytes() == weights_of(index.current)
    return index.current


def test_a_file_that_was_written_durably_survives_with_its_folders(disk: CrashingDisk, tmp_path: Path) -> None:
    write_durably(disk.folder / "a" / "b" / "file.json", "text")
    for copy in disk.survivors(tmp_path / "after"):
        assert (copy / "a" / "b" / "file.json").read_text() == "text"


def test_a_crash_while_a_file_is_replaced_leaves_the_old_or_the_new_text(disk: CrashingDisk, tmp_path: Path) -> None:
    write_durably(disk.folder / "file.json", "old")
    left: list[str] = []
    disk.at_each_change = lambda: left.extend(
        (copy / "file.json").read_text() for copy in disk.survivors(tmp_path / "after")
    )
    write_durably(disk.folder / "file.json", "new")
    assert left[-2:] == ["new", "new"]
    assert set(left) == {"old", "new"}


def test_a_version_that_was_made_current_survives(disk: CrashingDisk, tmp_path: Path) -> None:
    versions = versions_in(disk.folder / "not" / "there" / "yet")
    for version in (1, 2):
        asyncio.run(add(versions, version))
        for copy in disk.survivors(tmp_path / "after"):
            assert current_of(copy / "not" / "there" / "yet") == version


def test_whenever_the_machine_crashes_one_version_is_current_and_whole(disk: CrashingDisk, tmp_path: Path) -> None:
    versions = versions_in(disk.folder)
    asyncio.run(add(versions, 1))
    left: list[int] = []
    disk.at_each_change = lambda: left.extend(map(current_of, disk.survivors(tmp_path / "after")))
    asyncio.run(add(versions, 2))
    assert left[-2:] == [2, 2]
    assert set(left) == {1, 2}
