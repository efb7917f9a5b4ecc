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

from deployments.policy_failures import PieceMisplaced, VersionUnknown
from deployments.version_shelf import StoredVersion, VersionShelf
from rollout_client.contract import FieldProblem
from rollout_client.policy import UploadState


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


def filled(shelf: VersionShelf, *versions: int) -> None:
    for version in versions:
        weights = shelf.folder / "arrived"
        weights.parent.mkdir(parents=True, exist_ok=True)
        weights.write_bytes(b"%d" % version)
        shelf.put(info(version), weights)


def files(shelf: VersionShelf) -> set[str]:
    return {str(path.relative_to(shelf.folder)) for path in shelf.folder.rglob("*") if path.is_file()}


def send(shelf: VersionShelf, version: int, first: int, data: bytes, total: int | None = None) -> UploadState:
    shelf.begin_piece(version, first)
    shelf.write(version, first, data)
    return shelf.end_piece(version, first + len(data), total)


@contextmanager
def misplaced(received: int, first_byte: int) -> Iterator[None]:
    with pytest.raises(PieceMisplaced) as refused:
        yield
    message = f"{received} bytes have arrived; go on from there"
    assert refused.value.problems == (FieldProblem(field="content-range", message=message, value=first_byte),)


# Versions


def test_a_new_shelf_has_only_the_initial_version(tmp_path: Path) -> None:
    shelf = VersionShelf(tmp_path / "not" / "there")
    assert (shelf.current(), shelf.versions()) == (0, [])
    with pytest.raises(VersionUnknown) as unknown:
        shelf.info(0)
    assert unknown.value.problems[0].value == 0


def test_what_was_put_and_made_current_is_known_to_the_next_shelf(tmp_path: Path) -> None:
    shelf = VersionShelf(tmp_path)
    filled(shelf, 10, 9)
    shelf.make_current(9)
    after = VersionShelf(tmp_path)
    assert after.current() == 9
    assert after.versions() == [info(9), info(10)]
    assert after.info(10) == info(10)
    assert (after.weights(9).read_bytes(), after.weights(10).read_bytes()) == (b"9", b"10")
    assert files(shelf) == {
        "current.json",
        *(f"versions/{version}/{name}" for version in (9, 10) for name in ("info.json", "weights.safetensors")),
    }


def test_a_version_may_be_known_without_its_weights(tmp_path: Path) -> None:
    shelf = VersionShelf(tmp_path)
    shelf.put(info(3), None)
    assert shelf.info(3) == info(3)
    assert not shelf.weights(3).exists()


def test_a_version_that_never_became_current_can_be_put_again(tmp_path: Path) -> None:
    shelf = VersionShelf(tmp_path)
    filled(shelf, 2)
    shelf.put(info(2).model_copy(update={"kind": "transfer"}), None)
    assert shelf.info(2).kind == "transfer"
    assert not shelf.weights(2).exists()


def test_leftovers_of_a_put_that_died_are_in_nobodys_way(tmp_path: Path) -> None:
    shelf = VersionShelf(tmp_path)
    for leftover in ("making/2/weights.safetensors", "removing/2/info.json", "versions/2/weights.safetensors"):
        (tmp_path / leftover).parent.mkdir(parents=True)
        (tmp_path / leftover).write_bytes(b"half")
    assert shelf.versions() == []
    filled(shelf, 2)
    assert shelf.weights(2).read_bytes() == b"2"
    shelf.remove(2)
    assert files(shelf) == set()


def test_a_version_that_is_removed_is_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = VersionShelf(tmp_path)
    filled(shelf, 2)
    monkeypatch.setattr(shutil, "rmtree", lambda *_arguments, **_options: None)
    shelf.remove(2)
    assert (shelf.versions(), shelf.weights(2).exists()) == ([], False)


def test_only_the_named_versions_are_kept_and_the_initial_weights(tmp_path: Path) -> None:
    shelf = VersionShelf(tmp_path)
    filled(shelf, 1, 2, 3, 4)
    shelf.weights(0).parent.mkdir()
    shelf.weights(0).write_bytes(b"0")
    shelf.keep_only({4, 2, 99})
    assert [stored.version for stored in shelf.versions()] == [2, 4]
    assert sorted(path.name for path in (tmp_path / "versions").iterdir()) == ["0", "2", "4"]


def test_sweeping_removes_what_a_store_left_half_done(tmp_path: Path) -> None:
    shelf = VersionShelf(tmp_path)
    filled(shelf, 1, 2, 3)
    shelf.make_current(2)
    for version in (2, 3, 5):
        send(shelf, version, 0, b"abc")
    send(shelf, 4, 0, b"abc")
    shelf.upload_path(4).rename(tmp_path / "taken")
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
    shelf.sweep()
    kept = {f"versions/{version}/{name}" for version in (1, 2) for name in ("info.json", "weights.safetensors")}
    assert files(shelf) == kept | {
        "current.json",
        "uploads/3.part",
        "uploads/3.json",
        "uploads/5.part",
        "uploads/5.json",
    }
    assert shelf.upload_state(5) == UploadState(version=5, received_bytes=3)


def test_sweeping_a_folder_that_is_not_there_makes_none(tmp_path: Path) -> None:
    VersionShelf(tmp_path / "none").sweep()
    assert not (tmp_path / "none").exists()


# Uploads


def test_nothing_is_known_of_an_upload_that_was_not_begun(tmp_path: Path) -> None:
    with pytest.raises(VersionUnknown, match="nothing of it has arrived; begin at its first byte"):
        VersionShelf(tmp_path).upload_state(3)


def test_an_upload_goes_on_with_the_next_shelf(tmp_path: Path) -> None:
    assert send(VersionShelf(tmp_path), 3, 0, b"abc", 8) == UploadState(version=3, received_bytes=3, total_bytes=8)
    after = VersionShelf(tmp_path)
    assert after.upload_state(3) == UploadState(version=3, received_bytes=3, total_bytes=8)
    assert send(after, 3, 3, b"defgh", 8).received_bytes == 8
    assert after.upload_path(3).read_bytes() == b"abcdefgh"


def test_a_piece_that_leaves_a_hole_is_refused_with_what_has_arrived(tmp_path: Path) -> None:
    shelf = VersionShelf(tmp_path)
    with misplaced(0, 1):
        shelf.begin_piece(3, 1)
    send(shelf, 3, 0, b"abc")
    with misplaced(3, 4):
        shelf.begin_piece(3, 4)
    assert shelf.upload_state(3).received_bytes == 3
    assert shelf.upload_path(3).read_bytes() == b"abc"


def test_what_was_written_counts_only_once_its_piece_has_ended(tmp_path: Path) -> None:
    shelf = VersionShelf(tmp_path)
    send(shelf, 3, 0, b"abc")
    shelf.begin_piece(3, 3)
    shelf.write(3, 3, b"XYZ")
    after = VersionShelf(tmp_path)
    assert after.upload_state(3).received_bytes == 3
    send(after, 3, 3, b"d", 4)
    assert after.upload_path(3).read_bytes() == b"abcd"


def test_what_is_sent_again_counts_no_more_until_it_has_arrived_again(tmp_path: Path) -> None:
    shelf = VersionShelf(tmp_path)
    send(shelf, 3, 0, b"abcdef", 9)
    shelf.begin_piece(3, 2)
    shelf.write(3, 2, b"XX")
    assert shelf.upload_state(3) == UploadState(version=3, received_bytes=2)
    send(shelf, 3, 2, b"cdefghi", 9)
    assert shelf.upload_path(3).read_bytes() == b"abcdefghi"


def test_an_upload_begins_anew_at_its_first_byte(tmp_path: Path) -> None:
    shelf = VersionShelf(tmp_path)
    send(shelf, 3, 0, b"abcdef", 6)
    shelf.begin_piece(3, 0)
    assert shelf.upload_state(3) == UploadState(version=3, received_bytes=0)
    assert shelf.upload_path(3).read_bytes() == b""


def test_an_empty_piece_is_an_upload_of_nothing(tmp_path: Path) -> None:
    assert send(VersionShelf(tmp_path), 3, 0, b"", 0) == UploadState(version=3, received_bytes=0, total_bytes=0)


def test_a_sender_that_was_overtaken_cannot_leave_a_hole(tmp_path: Path) -> None:
    shelf = VersionShelf(tmp_path)
    send(shelf, 3, 0, b"abc")
    shelf.begin_piece(3, 3)
    shelf.write(3, 3, b"def")
    # Another one begins anew, and the first does not know.
    shelf.begin_piece(3, 0)
    shelf.write(3, 0, b"a")
    with misplaced(0, 6):
        shelf.write(3, 6, b"ghi")
    with misplaced(0, 6):
        shelf.end_piece(3, 6, None)
    assert shelf.end_piece(3, 1, None).received_bytes == 1


def test_a_sender_whose_upload_was_dropped_is_told_to_begin_anew(tmp_path: Path) -> None:
    shelf = VersionShelf(tmp_path)
    shelf.begin_piece(3, 0)
    shelf.drop_upload(3)
    with misplaced(0, 0):
        shelf.write(3, 0, b"abc")
    with misplaced(0, 3):
        shelf.end_piece(3, 3, None)


@pytest.mark.parametrize("left", [None, b"ab"])
def test_an_upload_whose_bytes_are_gone_has_not_arrived(tmp_path: Path, left: bytes | None) -> None:
    shelf = VersionShelf(tmp_path)
    send(shelf, 3, 0, b"abc")
    shelf.upload_path(3).unlink()
    if left is not None:
        shelf.upload_path(3).write_bytes(left)
    with pytest.raises(VersionUnknown):
        shelf.upload_state(3)
    with misplaced(0, 2):
        shelf.begin_piece(3, 2)
    assert send(shelf, 3, 0, b"abc").received_bytes == 3


def test_uploads_up_to_a_version_are_dropped_but_for_those_in_use(tmp_path: Path) -> None:
    shelf = VersionShelf(tmp_path)
    for version in (1, 2, 3, 10):
        send(shelf, version, 0, b"abc")
    shelf.drop_uploads_up_to(3, but={2})
    assert files(shelf) == {f"uploads/{version}.{end}" for version in (2, 10) for end in ("part", "json")}
    shelf.drop_upload(99)


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
            shelf = VersionShelf(Path(folder))
            if broken is None:
                assert send(shelf, 7, first, content[first:end], len(content)).received_bytes == end
            else:
                shelf.begin_piece(7, first)
                shelf.write(7, first, broken)
        assert shelf.upload_path(7).read_bytes() == content
        assert shelf.upload_state(7) == UploadState(version=7, received_bytes=len(content), total_bytes=len(content))
