"""Uploads on disk: chunks that arrive, break off, and go on after the store has died."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.policy.failures import ChunkMisplaced
from deployments.policy.uploads import Uploads
from deployments.policy.versions import InitialVersion, Versions
from rollout_client.contract.base import FieldProblem
from tests.paths import TINY_MODEL


class Disk:
    """The uploads in a folder, as the one store over it that lives has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.restart()

    def restart(self) -> None:
        """Another store takes the place of the one that died."""
        versions = Versions(self.folder, InitialVersion(str(TINY_MODEL), self.folder))
        self.uploads = Uploads(versions, ())
        self.sender: str | None = None

    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.glob("uploads/*")}

    def write(self, version: int, offset: int, data: bytes) -> None:
        self.sender = asyncio.run(self.uploads.write(version, self.sender, offset, data))

    def send(self, version: int, first: int, data: bytes) -> None:
        """Begins a chunk."""
        self.sender = None
        self.write(version, first, data)

    def arrived(self, version: int) -> int | None:
        """How many bytes count."""
        state = self.uploads.find(version)
        return None if state is None else state.received_bytes

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
    assert disk.arrived(3) is None


def test_an_upload_goes_on_with_the_next_store(disk: Disk) -> None:
    disk.send(3, 0, b"abc")
    disk.restart()
    assert disk.arrived(3) == 3
    disk.send(3, 3, b"defgh")
    assert (disk.arrived(3), disk.content(3)) == (8, b"abcdefgh")


def test_a_chunk_that_leaves_a_hole_is_refused_with_what_has_arrived(disk: Disk) -> None:
    with misplaced(0, 1):
        disk.send(3, 1, b"b")
    disk.send(3, 0, b"abc")
    with misplaced(3, 5):
        disk.write(3, 5, b"f")
    with misplaced(3, 4):
        disk.send(3, 4, b"e")
    assert (disk.arrived(3), disk.content(3)) == (3, b"abc")


def test_bytes_count_as_they_arrive(disk: Disk) -> None:
    disk.send(3, 0, b"abc")
    disk.write(3, 3, b"de")
    disk.restart()
    assert disk.arrived(3) == 5
    disk.send(3, 5, b"f")
    assert (disk.arrived(3), disk.content(3)) == (6, b"abcdef")


def test_what_is_sent_again_takes_the_place_of_all_that_had_arrived_from_there_on(disk: Disk) -> None:
    disk.send(3, 0, b"abcdef")
    for data in (b"XX", b"c"):
        disk.send(3, 2, data)
    assert disk.arrived(3) == 3
    disk.send(3, 3, b"defghi")
    assert disk.content(3) == b"abcdefghi"


def test_an_upload_begins_anew_at_its_first_byte(disk: Disk) -> None:
    disk.send(3, 0, b"abcdef")
    disk.send(3, 0, b"")
    assert (disk.arrived(3), disk.content(3)) == (0, b"")


def test_a_sender_whose_upload_was_dropped_is_told_so(disk: Disk) -> None:
    disk.send(3, 0, b"abc")
    disk.uploads.drop(3)
    with pytest.raises(ChunkMisplaced, match="another sender has begun a chunk"):
        disk.write(3, 3, b"def")
    with misplaced(0, 3):
        disk.send(3, 3, b"def")


def test_an_upload_that_lost_its_last_bytes_goes_on_before_them(disk: Disk) -> None:
    disk.send(3, 0, b"abc")
    disk.uploads.path(3).write_bytes(b"ab")
    disk.restart()
    assert disk.arrived(3) == 2
    disk.send(3, 2, b"cd")
    assert disk.content(3) == b"abcd"


def test_uploads_up_to_a_version_are_dropped(disk: Disk) -> None:
    for version in (1, 3, 10):
        disk.send(version, 0, b"abc")
    disk.uploads.drop_up_to(3)
    assert disk.files() == {"uploads/10.part"}
    disk.uploads.drop(99)


@st.composite
def attempts(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]]]:
    """A content, and its chunks: first byte and end."""
    content = draw(st.binary(max_size=60))
    steps: list[tuple[int, int]] = []
    arrived = 0
    for _ in range(draw(st.integers(0, 12))):
        first = draw(st.integers(0, arrived))
        arrived = draw(st.integers(first, len(content)))
        steps.append((first, arrived))
    return content, [*steps, (arrived, len(content))]


@settings(max_examples=25)
@given(attempts())
def test_whatever_the_chunks_and_the_breaks_the_file_is_the_same(
    case: tuple[bytes, list[tuple[int, int]]],
) -> None:
    content, steps = case
    with TemporaryDirectory() as folder:
        disk = Disk(Path(folder))
        for first, end in steps:
            disk.restart()
            disk.send(7, first, content[first:end])
            assert disk.arrived(7) == end
        assert disk.content(7) == content
