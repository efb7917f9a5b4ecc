"""Uploads on disk: chunks that arrive, break off, and go on after the store has died."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.policy.failures import ChunkMisplaced, VersionUnknown
from deployments.policy.uploads import UploadStore
from rollout_client.contract.policy import UploadState
from rollout_client.contract.problems import FieldProblem


def files(store: UploadStore) -> set[str]:
    """Except those that were discarded."""
    files = (str(path.relative_to(store.folder)) for path in store.folder.rglob("*") if path.is_file())
    return {file for file in files if not file.startswith("removing/")}


def send(store: UploadStore, version: int, first: int, data: bytes, total: int | None = None) -> UploadState:
    store.begin_chunk(version, first)
    store.write_chunk(version, first, data)
    return store.end_chunk(version, first + len(data), total)


@contextmanager
def misplaced(received: int, first_byte: int) -> Iterator[None]:
    with pytest.raises(ChunkMisplaced) as refused:
        yield
    message = f"{received} bytes have arrived; go on from there"
    assert refused.value.problems == (FieldProblem(field="content-range", message=message, value=first_byte),)


def test_nothing_is_known_of_an_upload_that_was_not_begun(tmp_path: Path) -> None:
    with pytest.raises(VersionUnknown, match="nothing of it has arrived; begin at its first byte"):
        UploadStore(tmp_path).state(3)


def test_an_upload_goes_on_with_the_next_store(tmp_path: Path) -> None:
    assert send(UploadStore(tmp_path), 3, 0, b"abc", 8) == UploadState(version=3, received_bytes=3, total_bytes=8)
    after = UploadStore(tmp_path)
    assert after.state(3) == UploadState(version=3, received_bytes=3, total_bytes=8)
    assert send(after, 3, 3, b"defgh", 8).received_bytes == 8
    assert after.path(3).read_bytes() == b"abcdefgh"


def test_a_chunk_that_leaves_a_hole_is_refused_with_what_has_arrived(tmp_path: Path) -> None:
    store = UploadStore(tmp_path)
    with misplaced(0, 1):
        store.begin_chunk(3, 1)
    send(store, 3, 0, b"abc")
    with misplaced(3, 4):
        store.begin_chunk(3, 4)
    assert store.state(3).received_bytes == 3
    assert store.path(3).read_bytes() == b"abc"


def test_bytes_count_only_once_their_chunk_has_ended(tmp_path: Path) -> None:
    store = UploadStore(tmp_path)
    send(store, 3, 0, b"abc")
    store.begin_chunk(3, 3)
    store.write_chunk(3, 3, b"XYZ")
    after = UploadStore(tmp_path)
    assert after.state(3).received_bytes == 3
    send(after, 3, 3, b"d", 4)
    assert after.path(3).read_bytes() == b"abcd"


def test_what_is_sent_again_counts_no_more_until_it_has_arrived_again(tmp_path: Path) -> None:
    store = UploadStore(tmp_path)
    send(store, 3, 0, b"abcdef", 9)
    store.begin_chunk(3, 2)
    store.write_chunk(3, 2, b"XX")
    assert store.state(3) == UploadState(version=3, received_bytes=2)
    send(store, 3, 2, b"cdefghi", 9)
    assert store.path(3).read_bytes() == b"abcdefghi"


def test_an_upload_begins_anew_at_its_first_byte(tmp_path: Path) -> None:
    store = UploadStore(tmp_path)
    send(store, 3, 0, b"abcdef", 6)
    store.begin_chunk(3, 0)
    assert store.state(3) == UploadState(version=3, received_bytes=0)
    assert store.path(3).read_bytes() == b""


def test_a_sender_that_was_overtaken_cannot_leave_a_hole(tmp_path: Path) -> None:
    store = UploadStore(tmp_path)
    send(store, 3, 0, b"abc")
    store.begin_chunk(3, 3)
    store.write_chunk(3, 3, b"def")
    # Another one begins anew, and the first does not know.
    store.begin_chunk(3, 0)
    store.write_chunk(3, 0, b"a")
    with misplaced(0, 6):
        store.write_chunk(3, 6, b"ghi")
    with misplaced(0, 6):
        store.end_chunk(3, 6, None)
    assert store.end_chunk(3, 1, None).received_bytes == 1


def test_a_sender_whose_upload_was_dropped_is_told_to_begin_anew(tmp_path: Path) -> None:
    store = UploadStore(tmp_path)
    store.begin_chunk(3, 0)
    store.drop(3)
    with misplaced(0, 0):
        store.write_chunk(3, 0, b"abc")
    with misplaced(0, 3):
        store.end_chunk(3, 3, None)


@pytest.mark.parametrize("left", [None, b"ab"])
def test_an_upload_whose_bytes_are_gone_has_not_arrived(tmp_path: Path, left: bytes | None) -> None:
    store = UploadStore(tmp_path)
    send(store, 3, 0, b"abc")
    store.path(3).unlink()
    if left is not None:
        store.path(3).write_bytes(left)
    with pytest.raises(VersionUnknown):
        store.state(3)
    with misplaced(0, 2):
        store.begin_chunk(3, 2)
    assert send(store, 3, 0, b"abc").received_bytes == 3


def test_uploads_up_to_a_version_are_dropped_except_those_in_use(tmp_path: Path) -> None:
    store = UploadStore(tmp_path)
    for version in (1, 2, 3, 10):
        send(store, version, 0, b"abc")
    store.drop_up_to(3, but={2})
    assert files(store) == {f"uploads/{version}.{end}" for version in (2, 10) for end in ("part", "json")}
    store.drop(99)


def test_only_uploads_of_later_versions_that_can_go_on_survive_a_restart(tmp_path: Path) -> None:
    store = UploadStore(tmp_path)
    for version in (2, 3, 4, 5):
        send(store, version, 0, b"abc")
    store.path(4).unlink()
    for leftover in ("6.part", "7.new"):
        (tmp_path / "uploads" / leftover).write_bytes(b"half")
    store.remove_unfinished(current=2)
    assert files(store) == {f"uploads/{version}.{suffix}" for version in (3, 5) for suffix in ("part", "json")}
    assert store.state(5) == UploadState(version=5, received_bytes=3)


@st.composite
def attempts(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int, bytes | None]]]:
    """A content, and its chunks: first byte, end, and what an attempt that breaks off writes instead."""
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


@settings(max_examples=25)
@given(attempts())
def test_whatever_the_chunks_and_the_breaks_the_file_is_the_same(
    case: tuple[bytes, list[tuple[int, int, bytes | None]]],
) -> None:
    content, steps = case
    with TemporaryDirectory() as folder:
        for first, end, broken in steps:
            store = UploadStore(Path(folder))
            if broken is None:
                assert send(store, 7, first, content[first:end], len(content)).received_bytes == end
            else:
                store.begin_chunk(7, first)
                store.write_chunk(7, first, broken)
        assert store.path(7).read_bytes() == content
        assert store.state(7) == UploadState(version=7, received_bytes=len(content), total_bytes=len(content))
