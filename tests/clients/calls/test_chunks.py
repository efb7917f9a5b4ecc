"""Chunks of an upload: joined they are the upload, whatever the blocks it comes in; one is held at a time."""

import tracemalloc
from collections.abc import Iterator

import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.calls.upload import Chunk, chunks, compressed
from rollout_client.weights.safetensors_file import BLOCK_BYTES, TensorEntry, Weights, header_of

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
