"""Versions on disk: what a store that starts in place of one that died knows of them."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from deployments.policy.failures import VersionUnknown
from deployments.policy.versions.version_store import StoredVersion, VersionStore


def info(version: int) -> StoredVersion:
    return StoredVersion(
        version=version,
        kind="adapter",
        base=1,
        checksum="c" * 64,
        size_bytes=3,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        upload_digest="d" * 64,
        adapter_config='{"r": 8}',
    )


def filled(version_store: VersionStore, *versions: int) -> None:
    for version in versions:
        weights = version_store.folder / "arrived"
        weights.parent.mkdir(parents=True, exist_ok=True)
        weights.write_bytes(b"%d" % version)
        version_store.add(info(version), weights)
        weights.unlink()


def files(version_store: VersionStore) -> set[str]:
    """Except those that were discarded."""
    files = (str(path.relative_to(version_store.folder)) for path in version_store.folder.rglob("*") if path.is_file())
    return {file for file in files if not file.startswith("removing/")}


def test_a_new_store_has_only_the_initial_version(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path / "not" / "there")
    assert (version_store.current(), version_store.versions()) == (0, [])
    with pytest.raises(VersionUnknown) as unknown:
        version_store.info(0)
    assert unknown.value.problems[0].value == 0


def test_what_was_added_and_made_current_is_known_to_the_next_store(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    filled(version_store, 10, 9)
    version_store.make_current(9)
    after = VersionStore(tmp_path)
    assert after.current() == 9
    assert after.versions() == [info(9), info(10)]
    assert after.info(10) == info(10)
    assert (after.weights(9).read_bytes(), after.weights(10).read_bytes()) == (b"9", b"10")
    assert files(version_store) == {
        "current.json",
        *(f"versions/{version}/{name}" for version in (9, 10) for name in ("info.json", "weights.safetensors")),
    }


def test_a_version_may_be_known_without_its_weights(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    version_store.add(info(3), None)
    assert version_store.info(3) == info(3)
    assert not version_store.weights(3).exists()


def test_a_version_that_never_became_current_can_be_added_again(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    filled(version_store, 2)
    version_store.add(info(2).model_copy(update={"kind": "transfer"}), None)
    assert version_store.info(2).kind == "transfer"
    assert not version_store.weights(2).exists()


def test_files_that_a_store_left_when_it_died_do_not_hinder_the_next(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    for leftover in ("making/2/weights.safetensors", "removing/2/info.json", "versions/2/weights.safetensors"):
        (tmp_path / leftover).parent.mkdir(parents=True)
        (tmp_path / leftover).write_bytes(b"half")
    assert version_store.versions() == []
    filled(version_store, 2)
    assert version_store.weights(2).read_bytes() == b"2"
    version_store.remove(2)
    assert files(version_store) == set()


def test_a_version_that_is_removed_is_gone_at_once_and_deleted_later(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    filled(version_store, 2)
    version_store.remove(2)
    assert (version_store.versions(), version_store.weights(2).exists()) == ([], False)
    assert sorted(path.read_bytes() for path in tmp_path.rglob("*.safetensors")) == [b"2"]
    version_store.trash.empty()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_weights_of_a_version_are_a_hard_link_of_the_file_that_was_added(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    (tmp_path / "arrived").write_bytes(b"weights")
    version_store.add(info(2), tmp_path / "arrived")
    assert version_store.weights(2).samefile(tmp_path / "arrived")


def test_only_the_named_versions_are_kept_and_the_initial_weights(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    filled(version_store, 1, 2, 3, 4)
    version_store.weights(0).parent.mkdir()
    version_store.weights(0).write_bytes(b"0")
    version_store.keep_only({4, 2, 99})
    assert [stored.version for stored in version_store.versions()] == [2, 4]
    assert sorted(path.name for path in (tmp_path / "versions").iterdir()) == ["0", "2", "4"]


def test_what_a_store_that_died_left_unfinished_is_removed(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    filled(version_store, 1, 2, 3)
    version_store.make_current(2)
    for leftover in ("making/9/weights.safetensors", "removing/1/info.json", "checking/9/fetched/a.safetensors"):
        (tmp_path / leftover).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / leftover).write_bytes(b"half")
    version_store.remove_unfinished()
    kept = {f"versions/{version}/{name}" for version in (1, 2) for name in ("info.json", "weights.safetensors")}
    assert files(version_store) == kept | {"current.json", "tried.json"}
    assert version_store.tried().versions == [info(3)]


def test_a_delta_lies_beside_the_full_weights_that_are_made_of_it(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    delta = info(2).model_copy(update={"kind": "delta", "delta_bytes": 7})
    for name in ("changes", "weights"):
        (tmp_path / name).write_bytes(name.encode())
    version_store.add(delta, tmp_path / "changes")
    assert (version_store.delta(2).read_bytes(), version_store.weights(2).exists()) == (b"changes", False)
    version_store.add_weights(2, tmp_path / "weights")
    assert version_store.weights(2).read_bytes() == b"weights"


def test_a_delta_that_a_store_left_unfinished_when_it_died_is_known_as_tried(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    filled(version_store, 1)
    version_store.make_current(1)
    delta = info(2).model_copy(update={"kind": "delta", "delta_bytes": 7})
    (tmp_path / "changes").write_bytes(b"changes")
    version_store.add(delta, tmp_path / "changes")
    version_store.remove_unfinished()
    assert version_store.versions() == [info(1)]
    assert version_store.tried().versions == [delta]
