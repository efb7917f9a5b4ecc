"""An upload cut into chunks of one size, each with its place. No I/O."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rollout_client.optional_dependencies import needed_for
from rollout_client.weights.safetensors_file import BLOCK_BYTES, Data

CHUNK_BYTES = 32 << 20
ZSTD_LEVEL = 3


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes `[begin, end)` of an upload."""

    begin: int
    body: bytes
    is_last: bool = False

    @property
    def end(self) -> int:
        return self.begin + len(self.body)


def chunks(blocks: Iterable[Data], chunk_bytes: int) -> Iterator[Chunk]:
    """`blocks` as chunks of `chunk_bytes`; the last one may be shorter, and there is always one.

    Holds one chunk and one block in memory.
    """
    begin, held_bytes, parts = 0, 0, list[memoryview]()
    for block in blocks:
        rest = memoryview(block)
        while len(rest):
            if held_bytes == chunk_bytes:
                # A full chunk is given out only when more bytes follow, because the last one is marked.
                chunk = Chunk(begin, b"".join(parts))
                yield chunk
                begin, held_bytes, parts = chunk.end, 0, []
                del chunk
            part, rest = rest[: chunk_bytes - held_bytes], rest[chunk_bytes - held_bytes :]
            parts.append(part)
            held_bytes += len(part)
    yield Chunk(begin, b"".join(parts), is_last=True)


def compressed(blocks: Iterable[Data]) -> Iterator[bytes]:
    """`blocks` as one zstd stream; raises `ModuleNotFoundError` if zstandard is not installed."""
    with needed_for("Compressing weights", "weights"):
        import zstandard
    stream = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj()
    for block in blocks:
        view = memoryview(block)
        for begin in range(0, len(view), BLOCK_BYTES):
            yield stream.compress(view[begin : begin + BLOCK_BYTES])
    yield stream.flush()
