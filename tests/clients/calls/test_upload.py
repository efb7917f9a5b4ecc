"""An upload: its chunks, what it sends after a disconnect, and when it gives up."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rollout_client import PolicyState
from rollout_client.calls.call import Call
from rollout_client.calls.upload import MAX_RESTARTS, Upload, chunks, compressed
from rollout_client.contract.policy import PolicyUpdate, UploadState
from rollout_client.errors import UploadLost
from rollout_client.weights.safetensors_file import BLOCK_BYTES, TensorEntry, Weights, header_of
from tests.clients.scripted_policy import Put, ScriptedPolicy, digest_of

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


def upload_of(is_repeatable: bool = True, chunk_bytes: int = 60) -> Upload:
    return Upload(weights(is_repeatable), VERSION, {"kind": "full"}, chunk_bytes)


def place(call: Call[Any]) -> tuple[int, int, str]:
    """First byte, end and total, as `Content-Range` says them."""
    span, total = call.content_headers["content-range"].removeprefix("bytes ").split("/")
    first, last = map(int, span.split("-"))
    return first, last + 1, total


def arrived(received_bytes: int) -> UploadState:
    return UploadState(version=VERSION, received_bytes=received_bytes)


def taken(policy: ScriptedPolicy, call: Call[Any], arriving_bytes: int | None) -> Any:
    """The answer of a service to `call`; `None` if only the first `arriving_bytes` of its body arrived."""
    body = call.body or b""
    if arriving_bytes is None or arriving_bytes >= len(body) or VERSION in policy.versions:
        _, answer = policy.take(Put(VERSION, {}, dict(call.content_headers), body))
        return answer if arriving_bytes is None else None
    policy.uploads[VERSION] = policy.uploads.get(VERSION, b"")[: place(call)[0]] + body[:arriving_bytes]
    return None


def state_of(policy: ScriptedPolicy) -> UploadState | PolicyState:
    uploaded = policy.uploads.get(VERSION)
    return arrived(len(uploaded)) if uploaded else policy.state()


@given(st.integers(1, 200), st.lists(st.none() | st.integers(0, 200), max_size=8), st.booleans())
def test_each_disconnect_costs_one_chunk_at_most_and_the_content_arrives(
    chunk_bytes: int, disconnects: list[int | None], is_repeatable: bool
) -> None:
    """`disconnects` says for each call how many bytes of its body arrived before the answer was lost, or `None`."""
    upload, policy = upload_of(is_repeatable, chunk_bytes), ScriptedPolicy()
    script = iter(disconnects)
    sent_bytes, lost_answers = 0, 0
    while upload.update is None:
        if upload.is_in_doubt:
            upload.resume_from(state_of(policy))
        call = upload.next_call()
        sent_bytes += len(call.body or b"")
        if (answer := taken(policy, call, next(script, None))) is None:
            lost_answers += 1
        else:
            upload.handle_response(answer)
    assert policy.content(VERSION) == CONTENT
    assert sent_bytes == upload.sent_bytes <= len(CONTENT) + lost_answers * chunk_bytes
    assert (upload.arrived_bytes, upload.total_bytes) == (len(CONTENT), len(CONTENT))


def test_the_size_of_a_compressed_upload_is_known_with_its_last_chunk() -> None:
    upload = Upload(weights(), VERSION, {"kind": "delta", "base": 2}, 50)
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
    assert call.content_headers["weights-digest"] == digest_of(CONTENT), "it is that of the file, not of the stream"
    assert totals == ["*"] * (len(totals) - 1) + [str(len(sent))]
    assert sizes == [None] * len(totals) + [len(sent)]
    assert upload.arrived_bytes == len(sent)


@pytest.mark.parametrize("received_bytes", [59, 121])
def test_bytes_outside_of_the_current_chunk_restart_the_upload(received_bytes: int) -> None:
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


BLOCKS = st.lists(st.binary(max_size=20), max_size=8)


@given(BLOCKS, st.integers(1, 30))
def test_chunks_have_one_size_join_to_the_blocks_and_the_last_is_known(blocks: list[bytes], chunk_bytes: int) -> None:
    made = list(chunks(iter(blocks), chunk_bytes))
    content = b"".join(blocks)
    assert b"".join(chunk.body for chunk in made) == content
    assert [chunk.begin for chunk in made] == list(range(0, max(len(content), 1), chunk_bytes))
    assert [chunk.end - chunk.begin for chunk in made] == [len(chunk.body) for chunk in made]
    assert all(len(chunk.body) == chunk_bytes for chunk in made[:-1])
    assert [chunk.is_last for chunk in made] == [False] * (len(made) - 1) + [True]


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
