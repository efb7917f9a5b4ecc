"""An upload cut into chunks of one size, each with its place and, on the last one, the digest of them all. No I/O."""

import hashlib
from base64 import b64encode
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
    repr_digest: str | None = None
    """The digest of the whole upload, as a header field; only the last chunk has it."""

    @property
    def end(self) -> int:
        return self.begin + len(self.body)

    @property
    def is_last(self) -> bool:
        return self.repr_digest is not None


def chunks(blocks: Iterable[Data], chunk_bytes: int) -> Iterator[Chunk]:
    """`blocks` as chunks of `chunk_bytes`; the last one may be shorter, and there is always one.

    Holds one chunk and one block in memory.
    """
    digest = hashlib.sha256()
    begin, held_bytes, parts = 0, 0, list[memoryview]()
    for block in blocks:
        rest = memoryview(block)
        while len(rest):
            if held_bytes == chunk_bytes:
                # A full chunk is given out only when more bytes follow, because the last one is marked.
                chunk = Chunk(begin, b"".join(parts))
                digest.update(chunk.body)
                yield chunk
                begin, held_bytes, parts = chunk.end, 0, []
                del chunk
            part, rest = rest[: chunk_bytes - held_bytes], rest[chunk_bytes - held_bytes :]
            parts.append(part)
            held_bytes += len(part)
    body = b"".join(parts)
    digest.update(body)
    yield Chunk(begin, body, digest_field(digest.digest()))


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


def digest_field(sha256: bytes) -> str:
    """A value of the header fields `Content-Digest` and `Repr-Digest` (RFC 9530)."""
    return f"sha-256=:{b64encode(sha256).decode()}:"
