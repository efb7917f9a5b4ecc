"""Versions and uploads on disk: what a store knows that comes after one that died, and pieces that break off."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.policy.failures import ChunkMisplaced, VersionUnknown
from deployments.policy.version_store import StoredVersion, VersionStore
from rollout_client.policy_contract import UploadState
from rollout_client.problem_contract import FieldProblem


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
        version_store.put(info(version), weights)


def files(version_store: VersionStore) -> set[str]:
    return {str(path.relative_to(version_store.folder)) for path in version_store.folder.rglob("*") if path.is_file()}


def send(version_store: VersionStore, version: int, first: int, data: bytes, total: int | None = None) -> UploadState:
    version_store.begin_chunk(version, first)
    version_store.write_chunk(version, first, data)
    return version_store.end_chunk(version, first + len(data), total)


@contextmanager
def misplaced(received: int, first_byte: int) -> Iterator[None]:
    with pytest.raises(ChunkMisplaced) as refused:
        yield
    message = f"{received} bytes have arrived; go on from there"
    assert refused.value.problems == (FieldProblem(field="content-range", message=message, value=first_byte),)


# Versions


def test_a_new_shelf_has_only_the_initial_version(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path / "not" / "there")
    assert (version_store.current(), version_store.versions()) == (0, [])
    with pytest.raises(VersionUnknown) as unknown:
        version_store.info(0)
    assert unknown.value.problems[0].value == 0


def test_what_was_put_and_made_current_is_known_to_the_next_shelf(tmp_path: Path) -> None:
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
    version_store.put(info(3), None)
    assert version_store.info(3) == info(3)
    assert not version_store.weights(3).exists()


def test_a_version_that_never_became_current_can_be_put_again(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    filled(version_store, 2)
    version_store.put(info(2).model_copy(update={"kind": "transfer"}), None)
    assert version_store.info(2).kind == "transfer"
    assert not version_store.weights(2).exists()


def test_leftovers_of_a_put_that_died_are_in_nobodys_way(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    for leftover in ("making/2/weights.safetensors", "removing/2/info.json", "versions/2/weights.safetensors"):
        (tmp_path / leftover).parent.mkdir(parents=True)
        (tmp_path / leftover).write_bytes(b"half")
    assert version_store.versions() == []
    filled(version_store, 2)
    assert version_store.weights(2).read_bytes() == b"2"
    version_store.remove(2)
    assert files(version_store) == set()


def test_a_version_that_is_removed_is_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version_store = VersionStore(tmp_path)
    filled(version_store, 2)
    monkeypatch.setattr(shutil, "rmtree", lambda *_arguments, **_options: None)
    version_store.remove(2)
    assert (version_store.versions(), version_store.weights(2).exists()) == ([], False)


def test_only_the_named_versions_are_kept_and_the_initial_weights(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    filled(version_store, 1, 2, 3, 4)
    version_store.weights(0).parent.mkdir()
    version_store.weights(0).write_bytes(b"0")
    version_store.keep_only({4, 2, 99})
    assert [stored.version for stored in version_store.versions()] == [2, 4]
    assert sorted(path.name for path in (tmp_path / "versions").iterdir()) == ["0", "2", "4"]


def test_sweeping_removes_what_a_store_left_half_done(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    filled(version_store, 1, 2, 3)
    version_store.make_current(2)
    for version in (2, 3, 5):
        send(version_store, version, 0, b"abc")
    send(version_store, 4, 0, b"abc")
    version_store.upload_path(4).rename(tmp_path / "taken")
    (tmp_path / "taken").unlink()
    for leftover in (
        "making/9/weights.safetensors",
        "removing/1/info.json",
        "checking/9/fetched/a.safetensors",
        "checking/5/unpacked.safetensors",
        "uploads/6.part",
        "uploads/7.new",
    ):
        (tmp_path / leftover).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / leftover).write_bytes(b"half")
    version_store.sweep()
    kept = {f"versions/{version}/{name}" for version in (1, 2) for name in ("info.json", "weights.safetensors")}
    assert files(version_store) == kept | {
        "current.json",
        "uploads/3.part",
        "uploads/3.json",
        "uploads/5.part",
        "uploads/5.json",
    }
    assert version_store.upload_state(5) == UploadState(version=5, received_bytes=3)


def test_sweeping_a_folder_that_is_not_there_makes_none(tmp_path: Path) -> None:
    VersionStore(tmp_path / "none").sweep()
    assert not (tmp_path / "none").exists()


# Uploads


def test_nothing_is_known_of_an_upload_that_was_not_begun(tmp_path: Path) -> None:
    with pytest.raises(VersionUnknown, match="nothing of it has arrived; begin at its first byte"):
        VersionStore(tmp_path).upload_state(3)


def test_an_upload_goes_on_with_the_next_shelf(tmp_path: Path) -> None:
    assert send(VersionStore(tmp_path), 3, 0, b"abc", 8) == UploadState(version=3, received_bytes=3, total_bytes=8)
    after = VersionStore(tmp_path)
    assert after.upload_state(3) == UploadState(version=3, received_bytes=3, total_bytes=8)
    assert send(after, 3, 3, b"defgh", 8).received_bytes == 8
    assert after.upload_path(3).read_bytes() == b"abcdefgh"


def test_a_piece_that_leaves_a_hole_is_refused_with_what_has_arrived(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    with misplaced(0, 1):
        version_store.begin_chunk(3, 1)
    send(version_store, 3, 0, b"abc")
    with misplaced(3, 4):
        version_store.begin_chunk(3, 4)
    assert version_store.upload_state(3).received_bytes == 3
    assert version_store.upload_path(3).read_bytes() == b"abc"


def test_what_was_written_counts_only_once_its_piece_has_ended(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    send(version_store, 3, 0, b"abc")
    version_store.begin_chunk(3, 3)
    version_store.write_chunk(3, 3, b"XYZ")
    after = VersionStore(tmp_path)
    assert after.upload_state(3).received_bytes == 3
    send(after, 3, 3, b"d", 4)
    assert after.upload_path(3).read_bytes() == b"abcd"


def test_what_is_sent_again_counts_no_more_until_it_has_arrived_again(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    send(version_store, 3, 0, b"abcdef", 9)
    version_store.begin_chunk(3, 2)
    version_store.write_chunk(3, 2, b"XX")
    assert version_store.upload_state(3) == UploadState(version=3, received_bytes=2)
    send(version_store, 3, 2, b"cdefghi", 9)
    assert version_store.upload_path(3).read_bytes() == b"abcdefghi"


def test_an_upload_begins_anew_at_its_first_byte(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    send(version_store, 3, 0, b"abcdef", 6)
    version_store.begin_chunk(3, 0)
    assert version_store.upload_state(3) == UploadState(version=3, received_bytes=0)
    assert version_store.upload_path(3).read_bytes() == b""


def test_an_empty_piece_is_an_upload_of_nothing(tmp_path: Path) -> None:
    assert send(VersionStore(tmp_path), 3, 0, b"", 0) == UploadState(version=3, received_bytes=0, total_bytes=0)


def test_a_sender_that_was_overtaken_cannot_leave_a_hole(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    send(version_store, 3, 0, b"abc")
    version_store.begin_chunk(3, 3)
    version_store.write_chunk(3, 3, b"def")
    # Another one begins anew, and the first does not know.
    version_store.begin_chunk(3, 0)
    version_store.write_chunk(3, 0, b"a")
    with misplaced(0, 6):
        version_store.write_chunk(3, 6, b"ghi")
    with misplaced(0, 6):
        version_store.end_chunk(3, 6, None)
    assert version_store.end_chunk(3, 1, None).received_bytes == 1


def test_a_sender_whose_upload_was_dropped_is_told_to_begin_anew(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    version_store.begin_chunk(3, 0)
    version_store.drop_upload(3)
    with misplaced(0, 0):
        version_store.write_chunk(3, 0, b"abc")
    with misplaced(0, 3):
        version_store.end_chunk(3, 3, None)


@pytest.mark.parametrize("left", [None, b"ab"])
def test_an_upload_whose_bytes_are_gone_has_not_arrived(tmp_path: Path, left: bytes | None) -> None:
    version_store = VersionStore(tmp_path)
    send(version_store, 3, 0, b"abc")
    version_store.upload_path(3).unlink()
    if left is not None:
        version_store.upload_path(3).write_bytes(left)
    with pytest.raises(VersionUnknown):
        version_store.upload_state(3)
    with misplaced(0, 2):
        version_store.begin_chunk(3, 2)
    assert send(version_store, 3, 0, b"abc").received_bytes == 3


def test_uploads_up_to_a_version_are_dropped_but_for_those_in_use(tmp_path: Path) -> None:
    version_store = VersionStore(tmp_path)
    for version in (1, 2, 3, 10):
        send(version_store, version, 0, b"abc")
    version_store.drop_uploads_up_to(3, but={2})
    assert files(version_store) == {f"uploads/{version}.{end}" for version in (2, 10) for end in ("part", "json")}
    version_store.drop_upload(99)


@st.composite
def attempts(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int, bytes | None]]]:
    """A content, and the pieces that bring it: from where, to where, and what a broken attempt writes instead."""
    content = draw(st.binary(max_size=60))
    steps: list[tuple[int, int, bytes | None]] = []
    arrived = 0
    for _ in range(draw(st.integers(0, 12))):
        first = draw(st.integers(0, arrived))
        broken = draw(st.none() | st.binary(max_size=80))
        end = draw(st.integers(first, len(content)))
        steps.append((first, end, broken))
        arrived = first if broken is not None and first < arrived else arrived if broken is not None else end
    return content, [*steps, (arrived, len(content), None)]


@settings(max_examples=25, deadline=None)
@given(attempts())
def test_whatever_the_pieces_and_the_breaks_the_file_is_the_same(
    case: tuple[bytes, list[tuple[int, int, bytes | None]]],
) -> None:
    content, steps = case
    with TemporaryDirectory() as folder:
        for first, end, broken in steps:
            version_store = VersionStore(Path(folder))
            if broken is None:
                assert send(version_store, 7, first, content[first:end], len(content)).received_bytes == end
            else:
                version_store.begin_chunk(7, first)
                version_store.write_chunk(7, first, broken)
        assert version_store.upload_path(7).read_bytes() == content
        assert version_store.upload_state(7) == UploadState(
            version=7, received_bytes=len(content), total_bytes=len(content)
        )
