"""Crashes of the machine: a version is current only if all of it is on disk."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.policy.uploads import Uploads
from deployments.policy.versions import Versions, read_index
from tests.deployments.policy.crashing_disk import CrashingDisk
from tests.deployments.policy.test_versions import info, versions_in


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CrashingDisk]:
    (tmp_path / "disk").mkdir()
    disk = CrashingDisk(tmp_path / "disk")
    disk.install(monkeypatch)
    yield disk
    monkeypatch.undo()
    disk.close()


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


def test_whenever_the_machine_crashes_one_version_is_current_and_whole(disk: CrashingDisk, tmp_path: Path) -> None:
    place = Path("not", "there", "yet")
    versions, left = versions_in(disk.folder / place), list[int]()
    disk.at_each_change = lambda: left.extend(current_of(copy / place) for copy in disk.survivors(tmp_path / "after"))
    for version in (1, 2):
        left.clear()
        asyncio.run(add(versions, version))
        assert left[-2:] == [version, version]
        assert set(left) == {version - 1, version}
