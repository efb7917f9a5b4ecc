"""Versions on disk: what a store that starts in place of one that died knows of them."""

import logging
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deployments.policy.commands import LoadedWeights
from deployments.policy.durable_files import Trash
from deployments.policy.failures import VersionRefused, VersionUnknown
from deployments.policy.policies import CLEAN_UP_EVERY_S
from deployments.policy.versions import InitialVersion, Version, Versions
from tests.deployments.policy.policy_world import World, in_world
from tests.paths import TINY_MODEL
from tests.virtual_time import now, runs, until


def versions_in(folder: Path) -> Versions:
    return Versions(folder, InitialVersion(str(TINY_MODEL), folder))


def info(version: int) -> Version:
    return Version(
        version=version,
        kind="full",
        key=f"key {version}",
        checksum="c" * 64,
        size_bytes=3,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        upload_digest="d" * 64,
    )


class Refused(Exception):
    pass


@runs
async def add(versions: Versions, version: Version, is_current: bool = True) -> None:
    arrived = versions.folder / "arrived"
    arrived.parent.mkdir(parents=True, exist_ok=True)
    arrived.write_bytes(b"%d" % version.version)
    with suppress(Refused):
        async with versions.adding(version, arrived):
            if not is_current:
                raise Refused
            versions.make_current(version)
    versions.note_published()
    arrived.unlink()


def files(folder: Path) -> set[str]:
    """Except those that were discarded."""
    found = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {file for file in found if not file.startswith("removing/")}


def test_what_became_current_is_known_to_the_next_store(tmp_path: Path) -> None:
    versions = versions_in(tmp_path / "not" / "there")
    assert (versions.current, versions.all, versions.desired) == (0, [], LoadedWeights())
    with pytest.raises(VersionUnknown) as unknown:
        versions.info(0)
    assert unknown.value.problems[0].value == 0
    assert files(tmp_path) == set()
    add(versions, info(2), is_current=False)
    assert (versions.current, versions.all, versions.newest, files(versions.folder)) == (0, [], 0, set())
    for version in (2, 10):
        add(versions, info(version))
    after = versions_in(versions.folder)
    assert (after.current, after.all) == (10, [info(2), info(10)])
    assert (after.weights(2).read_bytes(), after.weights(10).read_bytes()) == (b"2", b"10")
    names = {"versions.json", "versions/2.safetensors", "versions/10.safetensors"}
    assert files(versions.folder) == names


def test_a_version_may_be_known_without_its_weights(tmp_path: Path) -> None:
    versions = versions_in(tmp_path)
    transferred = info(3).model_copy(update={"stored": "nothing"})
    versions.make_current(transferred)
    assert (versions.current, versions.info(3), versions.has_weights(3)) == (3, transferred, False)
    with pytest.raises(VersionUnknown):
        versions.file(3)
    (tmp_path / "saved").write_bytes(b"weights")
    versions.add_weights(transferred, tmp_path / "saved")
    after = versions_in(tmp_path)
    assert (after.info(3).stored, after.file(3).read_bytes()) == ("whole", b"weights")
    (tmp_path / "late").write_bytes(b"weights of a version that was removed meanwhile")
    after.add_weights(info(2), tmp_path / "late")
    assert (after.all, (tmp_path / "late").exists()) == ([after.info(3)], True)


def test_files_that_a_dead_store_left_are_removed_at_the_next_start(tmp_path: Path) -> None:
    versions = versions_in(tmp_path)
    add(versions, info(1))
    for leftover in ("making/2/a.safetensors", "versions/2.safetensors", "versions/2.delta.safetensors"):
        (tmp_path / leftover).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / leftover).write_bytes(b"half")
    (tmp_path / "versions" / "0.safetensors").write_bytes(b"initial")
    assert versions_in(tmp_path).all == [info(1)]
    assert files(tmp_path) == {"versions.json", "versions/0.safetensors", "versions/1.safetensors"}


def test_a_version_that_is_removed_is_gone_at_once_and_deleted_later(tmp_path: Path) -> None:
    versions = versions_in(tmp_path)
    for version in (1, 2, 3, 4):
        add(versions, info(version))
    versions.keep_only({4, 2, 99})
    assert [each.version for each in versions.all] == [each.version for each in versions_in(tmp_path).all] == [2, 4]
    assert files(tmp_path) == {"versions.json", "versions/2.safetensors", "versions/4.safetensors"}
    assert len(list((tmp_path / "removing").iterdir())) == 2
    versions.trash.empty()
    assert list((tmp_path / "removing").iterdir()) == []


def test_a_number_that_a_replica_has_is_not_given_again_by_the_next_store(tmp_path: Path) -> None:
    versions = versions_in(tmp_path)
    add(versions, info(3))
    versions.take(2)
    assert versions.newest == 3
    versions.take(7)
    after = versions_in(tmp_path)
    assert (after.current, after.newest) == (3, 7)
    with pytest.raises(VersionRefused):
        after.refuse_taken(7)


def test_a_store_whose_folder_another_one_has_changed_writes_nothing(tmp_path: Path) -> None:
    before, after = versions_in(tmp_path), versions_in(tmp_path)
    add(after, info(1))
    with pytest.raises(OSError, match="was changed by another policy store"):
        add(before, info(2))
    assert versions_in(tmp_path).all == [info(1)]
    assert files(tmp_path) == {"versions.json", "versions/1.safetensors", "arrived"}


@in_world()
async def test_a_disk_that_fails_while_files_are_cleaned_up_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emptied: list[Path] = []

    def empty(trash: Trash) -> None:
        emptied.append(trash.folder)
        if len(emptied) < 3:
            raise OSError("the disk is gone")

    monkeypatch.setattr(Trash, "empty", empty)
    await until(lambda: len(emptied) == 3)
    assert (emptied, now()) == ([world.folder] * 3, 2 * CLEAN_UP_EVERY_S)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == ["Files of the policy store could not be removed."] * 2
