"""An upload: its chunks, what it sends after a disconnect, and when it gives up."""

import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rollout_client import PolicyState, PolicyUpdate, UploadLost
from rollout_client.calls.call import Call
from rollout_client.calls.upload import MAX_RESTARTS, Chunk, Upload, chunks, compressed
from rollout_client.contract.policy import UploadState, VersionInfo
from rollout_client.weights.checksum import Checksum, weights_digest
from rollout_client.weights.safetensors_file import BLOCK_BYTES, TensorEntry, Weights, header_of

VERSION = 3
NOTHING_KNOWN = PolicyState(current=0, versions=[], replicas=[])
DATA = bytes(range(100))


def weights(is_repeatable: bool = True) -> Weights:
    """A file of 172 bytes."""

    def read(_: TensorEntry) -> Iterator[bytes]:
        yield DATA[:30]
        yield DATA[30:]

    return Weights(header_of([("a", "U8", (100,))]), read, is_repeatable)


def content_of(source: Weights) -> bytes:
    return b"".join(bytes(block) for block in source.blocks())


CONTENT = content_of(weights())


def digest_of_content() -> str:
    checksum = Checksum()
    checksum.add("a", "U8", (100,), [DATA])
    return weights_digest(CONTENT[:-100], checksum.hexdigest())


def upload_of(is_repeatable: bool = True, chunk_bytes: int = 60) -> Upload:
    return Upload(weights(is_repeatable), VERSION, {"kind": "full"}, chunk_bytes)


def place(call: Call[Any]) -> tuple[int, int, str]:
    """First byte, end and total, as `Content-Range` says them."""
    span, total = call.content_headers["content-range"].removeprefix("bytes ").split("/")
    first, last = map(int, span.split("-"))
    return first, last + 1, total


def arrived(received_bytes: int) -> UploadState:
    return UploadState(version=VERSION, received_bytes=received_bytes)


class Store:
    """The service's side of an upload, as the contract says it."""

    def __init__(self) -> None:
        self.content = b""
        self.is_complete = False
        self.sent_bytes = 0

    def put(self, call: Call[Any], arriving_bytes: int | None = None) -> PolicyUpdate | UploadState:
        """Takes the first `arriving_bytes` of the body, by default all of it."""
        begin, end, total = place(call)
        body = call.body or b""
        assert begin <= len(self.content)
        assert len(body) == end - begin
        self.sent_bytes += len(body)
        if self.is_complete:
            return PolicyUpdate(version=VERSION, checksum=None, replicas=[])
        self.content = self.content[:begin] + body[:arriving_bytes]
        if total != str(len(self.content)):
            return self.upload_state()
        assert call.content_headers["weights-digest"] == digest_of_content()
        self.is_complete = True
        return PolicyUpdate(version=VERSION, checksum=None, replicas=[])

    def upload_state(self) -> UploadState:
        return arrived(len(self.content))

    def state(self) -> UploadState | PolicyState:
        if not self.is_complete:
            return self.upload_state() if self.content else NOTHING_KNOWN
        info = VersionInfo(version=VERSION, kind="full", created_at=datetime.now(UTC))
        return PolicyState(current=VERSION, versions=[info], replicas=[])


@given(st.integers(1, 200), st.lists(st.none() | st.integers(0, 200), max_size=8), st.booleans())
def test_after_any_disconnects_the_service_has_the_content_and_each_cost_at_most_one_chunk(
    chunk_bytes: int, disconnects: list[int | None], is_repeatable: bool
) -> None:
    """`disconnects` says for each call how many bytes of its body arrived before the answer was lost, or `None`."""
    upload, store = upload_of(is_repeatable, chunk_bytes), Store()
    script = iter(disconnects)
    lost_answers = 0
    while upload.update is None:
        if upload.is_in_doubt:
            upload.resume_from(store.state())
        call = upload.next_call()
        if (arriving_bytes := next(script, None)) is None:
            upload.handle_response(store.put(call))
        else:
            store.put(call, arriving_bytes)
            lost_answers += 1
        assert upload.arrived_bytes <= len(store.content)
    assert store.content == CONTENT
    assert store.sent_bytes <= len(CONTENT) + lost_answers * chunk_bytes
    assert (upload.arrived_bytes, upload.total_bytes) == (len(CONTENT), len(CONTENT))


def test_the_size_of_a_compressed_upload_is_known_with_its_last_chunk() -> None:
    upload = Upload(weights(), VERSION, {"kind": "delta", "base": 2}, 50, is_compressed=True)
    sent, totals, sizes = b"", list[str](), [upload.total_bytes]
    while upload.update is None:
        call = upload.next_call()
        sent += call.body or b""
        sizes.append(upload.total_bytes)
        totals.append(place(call)[2])
        assert call.content_headers["content-encoding"] == "zstd"
        is_last = "weights-digest" in call.content_headers
        update = PolicyUpdate(version=VERSION, checksum=None, replicas=[])
        upload.handle_response(update if is_last else arrived(len(sent)))
    assert zstandard.ZstdDecompressor().decompressobj().decompress(sent) == CONTENT
    assert call.content_headers["weights-digest"] == digest_of_content(), "it is that of the file, not of the stream"
    assert totals == ["*"] * (len(totals) - 1) + [str(len(sent))]
    assert sizes == [None] * len(totals) + [len(sent)]
    assert upload.arrived_bytes == len(sent)


@pytest.mark.parametrize("received_bytes", [59, 121])
def test_a_service_with_bytes_outside_the_current_chunk_gets_the_upload_from_its_start(received_bytes: int) -> None:
    upload = upload_of()
    upload.next_call()
    upload.handle_response(arrived(60))
    upload.next_call()
    upload.resume_from(arrived(received_bytes))
    assert (place(upload.next_call())[0], upload.arrived_bytes) == (0, 0)


def test_an_upload_restarts_at_most_so_often() -> None:
    upload = upload_of()
    for _ in range(MAX_RESTARTS):
        assert place(upload.next_call())[0] == 0
        upload.handle_response(arrived(60))
        assert place(upload.next_call())[0] == 60
        upload.resume_from(NOTHING_KNOWN)
    upload.next_call()
    upload.handle_response(arrived(60))
    upload.next_call()
    with pytest.raises(UploadLost, match="has 0 bytes of version 3 after 60 had arrived, each time it was sent: push"):
        upload.resume_from(NOTHING_KNOWN)


def test_sharded_weights_are_not_gathered_twice() -> None:
    upload = upload_of(is_repeatable=False)
    upload.next_call()
    upload.handle_response(arrived(60))
    upload.next_call()
    with pytest.raises(UploadLost, match="sharded weights are gathered only once: push it again"):
        upload.resume_from(NOTHING_KNOWN)


def test_a_chunk_needs_a_byte() -> None:
    assert upload_of(chunk_bytes=1).next_call().body == CONTENT[:1]
    with pytest.raises(ValueError, match=r"^chunk_bytes=0: a chunk needs at least one byte\.$"):
        upload_of(chunk_bytes=0)


BLOCKS = st.lists(st.binary(max_size=20), max_size=8)


@given(BLOCKS, st.integers(1, 30))
def test_chunks_follow_one_another_have_one_size_and_join_to_the_blocks(blocks: list[bytes], chunk_bytes: int) -> None:
    made = list(chunks(iter(blocks), chunk_bytes))
    content = b"".join(blocks)
    assert b"".join(chunk.body for chunk in made) == content
    assert [chunk.begin for chunk in made] == list(range(0, max(len(content), 1), chunk_bytes))
    assert [chunk.end - chunk.begin for chunk in made] == [len(chunk.body) for chunk in made]
    assert all(len(chunk.body) == chunk_bytes for chunk in made[:-1])


@given(BLOCKS, st.integers(1, 30))
def test_the_last_chunk_is_known_as_the_last(blocks: list[bytes], chunk_bytes: int) -> None:
    made = list(chunks(iter(blocks), chunk_bytes))
    assert [chunk.is_last for chunk in made] == [False] * (len(made) - 1) + [True]


def test_an_upload_of_nothing_is_one_empty_chunk() -> None:
    assert list(chunks([], 4)) == [Chunk(0, b"", is_last=True)]


@given(BLOCKS)
def test_a_compressed_upload_is_one_zstd_stream_of_the_blocks(blocks: list[bytes]) -> None:
    stream = b"".join(compressed(iter(blocks)))
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    assert decompressor.decompress(stream) == b"".join(blocks)
    assert decompressor.unused_data == b""


def test_a_block_above_the_limit_is_compressed_in_parts() -> None:
    block = bytes(BLOCK_BYTES + 1)
    parts = list(compressed([block]))
    assert len(parts) == 3
    assert zstandard.ZstdDecompressor().decompressobj().decompress(b"".join(parts)) == block


def test_tensors_are_read_one_at_a_time_and_chunks_held_one_at_a_time() -> None:
    made: list[str] = []

    def read(entry: TensorEntry) -> Iterator[bytes]:
        made.append(entry.name)
        yield bytes(entry.size_bytes)

    header = header_of([(f"layer.{place}", "U8", (1 << 20,)) for place in range(64)])
    tracemalloc.start()
    sizes = []
    for number, chunk in enumerate(chunks(Weights(header, read).blocks(), 4 << 20)):
        sizes.append(len(chunk.body))
        assert len(made) <= 4 * (number + 1) + 1
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(sizes) == header.file_bytes
    assert peak_bytes < 16 << 20
