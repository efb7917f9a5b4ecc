"""Crashes of the machine: a version is current only if all of it is on disk."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deployments.policy.uploads.upload_store import UploadStore
from deployments.policy.versions.version_store import StoredVersion, VersionStore, make_folder_durably, write_durably
from tests.deployments.policy.crashing_disk import CrashingDisk


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CrashingDisk]:
    (tmp_path / "disk").mkdir()
    disk = CrashingDisk(tmp_path / "disk")
    disk.install(monkeypatch)
    yield disk
    monkeypatch.undo()
    disk.close()


def info(version: int) -> StoredVersion:
    return StoredVersion(version=version, kind="full", created_at=datetime(2026, 1, 1, tzinfo=UTC), checksum="c" * 64)


def weights_of(version: int) -> bytes:
    return b"weights of %d" % version


def add(store: VersionStore, version: int) -> None:
    content = weights_of(version)
    uploads = UploadStore(store.folder)
    uploads.begin_chunk(version, 0)
    uploads.write_chunk(version, 0, content)
    uploads.end_chunk(version, len(content), len(content))
    store.add(info(version), uploads.path(version))


def current_of(folder: Path) -> int:
    """Asserts that what is current there is whole."""
    store = VersionStore(folder)
    current = store.current()
    if current:
        assert (store.info(current), store.weights(current).read_bytes()) == (info(current), weights_of(current))
    return current


def test_a_file_that_was_written_durably_survives_in_folders_that_were_made_for_it(
    disk: CrashingDisk, tmp_path: Path
) -> None:
    write_durably(disk.folder / "a" / "b" / "file.json", "text")
    for copy in disk.survivors(tmp_path / "after"):
        assert (copy / "a" / "b" / "file.json").read_text() == "text"


def test_a_crash_while_a_file_is_replaced_leaves_the_old_text_or_the_new_one(
    disk: CrashingDisk, tmp_path: Path
) -> None:
    write_durably(disk.folder / "file.json", "old")
    left: list[str] = []
    disk.at_each_change = lambda: left.extend(
        (copy / "file.json").read_text() for copy in disk.survivors(tmp_path / "after")
    )
    write_durably(disk.folder / "file.json", "new")
    assert left[-2:] == ["new", "new"]
    assert set(left) == {"old", "new"}


def test_a_folder_that_was_made_durably_survives_with_its_parents(disk: CrashingDisk, tmp_path: Path) -> None:
    make_folder_durably(disk.folder / "a" / "b")
    make_folder_durably(disk.folder / "a" / "b")
    for copy in disk.survivors(tmp_path / "after"):
        assert (copy / "a" / "b").is_dir()


def test_a_version_that_was_made_current_survives(disk: CrashingDisk, tmp_path: Path) -> None:
    store = VersionStore(disk.folder / "not" / "there" / "yet")
    for version in (1, 2):
        add(store, version)
        store.make_current(version)
        for copy in disk.survivors(tmp_path / "after"):
            assert current_of(copy / "not" / "there" / "yet") == version


def test_a_version_that_was_added_survives_before_it_is_current(disk: CrashingDisk, tmp_path: Path) -> None:
    store = VersionStore(disk.folder)
    add(store, 1)
    for copy in disk.survivors(tmp_path / "after"):
        after = VersionStore(copy)
        assert (after.current(), after.versions()) == (0, [info(1)])
        assert after.weights(1).read_bytes() == weights_of(1)


def test_whenever_the_machine_crashes_the_version_before_or_the_new_one_is_current_and_whole(
    disk: CrashingDisk, tmp_path: Path
) -> None:
    store = VersionStore(disk.folder)
    add(store, 1)
    store.make_current(1)
    left: list[int] = []
    disk.at_each_change = lambda: left.extend(map(current_of, disk.survivors(tmp_path / "after")))
    add(store, 2)
    store.make_current(2)
    assert left[-2:] == [2, 2]
    assert set(left) == {1, 2}
    assert json.loads((disk.folder / "current.json").read_text()) == {"version": 2}
