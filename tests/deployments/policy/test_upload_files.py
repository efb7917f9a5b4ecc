"""Uploads on disk: chunks that arrive, break off, and go on after the store has died."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.policy.failures import ChunkMisplaced, VersionUnknown
from deployments.policy.initial_version import InitialVersion
from deployments.policy.uploads import ActivePushes, Uploads
from deployments.policy.versions import Versions
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.problems import FieldProblem
from tests.paths import TINY_MODEL


class Disk:
    """The uploads in a folder, as the one store over it that lives has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.restart()

    def restart(self) -> None:
        """Another store takes the place of the one that died."""
        versions = Versions(self.folder, InitialVersion(str(TINY_MODEL), self.folder))
        self.uploads = Uploads(versions, ActivePushes(BackgroundTasks()), None, 60.0)
        self.sender = ""

    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.glob("uploads/*")}

    def begin(self, version: int, first: int) -> None:
        self.sender = asyncio.run(self.uploads.begin_chunk(version, first))

    def write(self, version: int, offset: int, data: bytes) -> None:
        asyncio.run(self.uploads.write_chunk(version, self.sender, offset, data))

    def end(self, version: int, total: int | None = None) -> None:
        asyncio.run(self.uploads.end_chunk(version, self.sender, total))

    def send(self, version: int, first: int, data: bytes, total: int | None = None) -> None:
        self.begin(version, first)
        self.write(version, first, data)
        self.end(version, total)

    def arrived(self, version: int) -> tuple[int, int | None]:
        """How many bytes count, and how many there will be."""
        state = self.uploads.state(version)
        return state.received_bytes, state.total_bytes

    def content(self, version: int) -> bytes:
        return self.uploads.path(version).read_bytes()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@contextmanager
def misplaced(received: int, first_byte: int) -> Iterator[None]:
    with pytest.raises(ChunkMisplaced) as refused:
        yield
    message = f"{received} bytes have arrived; go on from there"
    assert refused.value.problems == (FieldProblem(field="content-range", message=message, value=first_byte),)


def test_nothing_is_known_of_an_upload_that_was_not_begun(disk: Disk) -> None:
    with pytest.raises(VersionUnknown, match="nothing of it has arrived; begin at its first byte"):
        disk.arrived(3)


def test_an_upload_goes_on_with_the_next_store(disk: Disk) -> None:
    disk.send(3, 0, b"abc", 8)
    disk.restart()
    assert disk.arrived(3) == (3, 8)
    disk.send(3, 3, b"defgh", 8)
    assert (disk.arrived(3), disk.content(3)) == ((8, 8), b"abcdefgh")


def test_a_chunk_that_leaves_a_hole_is_refused_with_what_has_arrived(disk: Disk) -> None:
    with misplaced(0, 1):
        disk.begin(3, 1)
    disk.send(3, 0, b"abc")
    with misplaced(3, 4):
        disk.begin(3, 4)
    assert (disk.arrived(3), disk.content(3)) == ((3, None), b"abc")
    disk.begin(3, 3)
    with misplaced(3, 5):
        disk.write(3, 5, b"f")


def test_bytes_count_as_they_arrive(disk: Disk) -> None:
    disk.send(3, 0, b"abc")
    disk.begin(3, 3)
    disk.write(3, 3, b"de")
    disk.restart()
    assert disk.arrived(3) == (5, None)
    disk.send(3, 5, b"f", 6)
    assert (disk.arrived(3), disk.content(3)) == ((6, 6), b"abcdef")


def test_what_is_sent_again_counts_no_more_until_it_has_arrived_again(disk: Disk) -> None:
    disk.send(3, 0, b"abcdef", 9)
    disk.begin(3, 2)
    assert disk.arrived(3) == (2, None)
    for data in (b"XX", b"c"):
        disk.write(3, 2, data)
    assert disk.arrived(3) == (3, None)
    disk.send(3, 3, b"defghi", 9)
    assert disk.content(3) == b"abcdefghi"


def test_an_upload_begins_anew_at_its_first_byte(disk: Disk) -> None:
    disk.send(3, 0, b"abcdef", 6)
    disk.begin(3, 0)
    assert (disk.arrived(3), disk.content(3)) == ((0, None), b"")


def test_a_sender_whose_upload_was_dropped_is_told_to_begin_anew(disk: Disk) -> None:
    disk.begin(3, 0)
    disk.uploads.drop(3)
    with misplaced(0, 0):
        disk.write(3, 0, b"abc")
    with misplaced(0, 0):
        disk.end(3, 3)


def test_an_upload_whose_bytes_are_gone_has_not_arrived(disk: Disk) -> None:
    disk.send(3, 0, b"abc")
    disk.uploads.path(3).unlink()
    with pytest.raises(VersionUnknown):
        disk.arrived(3)
    with misplaced(0, 2):
        disk.begin(3, 2)
    disk.send(3, 0, b"abc")
    assert disk.arrived(3) == (3, None)


def test_an_upload_that_lost_its_last_bytes_goes_on_before_them(disk: Disk) -> None:
    disk.send(3, 0, b"abc", 4)
    disk.uploads.path(3).write_bytes(b"ab")
    disk.restart()
    assert disk.arrived(3) == (2, 4)
    disk.send(3, 2, b"cd", 4)
    assert disk.content(3) == b"abcd"


def test_uploads_up_to_a_version_are_dropped(disk: Disk) -> None:
    for version in (1, 3, 10):
        disk.send(version, 0, b"abc")
    disk.uploads.drop_up_to(3)
    assert disk.files() == {"uploads/10.part", "uploads/10.json"}
    disk.uploads.drop(99)


def test_only_uploads_that_can_go_on_survive_a_restart(disk: Disk) -> None:
    for version in (3, 4, 5):
        disk.send(version, 0, b"abc")
    disk.uploads.path(4).unlink()
    for leftover in ("6.part", "7.new"):
        (disk.folder / "uploads" / leftover).write_bytes(b"half")
    disk.restart()
    assert disk.files() == {f"uploads/{version}.{suffix}" for version in (3, 5) for suffix in ("part", "json")}
    assert disk.arrived(5) == (3, None)


@st.composite
def attempts(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int, bool]]]:
    """A content, and its chunks: first byte, end, and whether the sender breaks off without ending it."""
    content = draw(st.binary(max_size=60))
    steps: list[tuple[int, int, bool]] = []
    arrived = 0
    for _ in range(draw(st.integers(0, 12))):
        first = draw(st.integers(0, arrived))
        arrived = draw(st.integers(first, len(content)))
        steps.append((first, arrived, draw(st.booleans())))
    return content, [*steps, (arrived, len(content), False)]


@settings(max_examples=25)
@given(attempts())
def test_whatever_the_chunks_and_the_breaks_the_file_is_the_same(
    case: tuple[bytes, list[tuple[int, int, bool]]],
) -> None:
    content, steps = case
    with TemporaryDirectory() as folder:
        disk = Disk(Path(folder))
        for first, end, is_broken in steps:
            disk.restart()
            disk.begin(7, first)
            disk.write(7, first, content[first:end])
            if not is_broken:
                disk.end(7, len(content))
            assert disk.arrived(7) == (end, None if is_broken else len(content))
        assert disk.content(7) == content
