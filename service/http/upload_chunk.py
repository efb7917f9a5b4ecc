"""Reads one chunk of a weight upload: its headers, and its bytes, whose number is checked against the headers."""

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from deployments.policy.failures import ChunkDamaged
from rollout_client.contract.policy import WEIGHTS_DIGEST
from service.http.request_body import content_coding, stated_length
from service.problems import body_too_large, unreadable_body

_ZSTD = "zstd"
FORWARDED_BYTES = 4 * 2**20
"""Bytes per call of the policy store."""
LARGEST_BODY_BYTES = 256 * 2**20
"""Serve's proxy keeps in its memory what the policy store has not received yet."""
_MOST_SHOWN = 80
"""Characters of a header in a message."""


@dataclass(frozen=True, slots=True)
class _UploadChunk:
    """Description of a request's body by its headers."""

    weights_digest: str | None
    """Digest (hex) of the file that the whole upload makes (`Weights-Digest`)."""
    is_zstd: bool
    first: int = 0
    """Offset of the first byte of the chunk in the upload."""
    end: int | None = None
    """Offset after its last byte; `None` for a body that is the whole upload."""
    total: int | None = None
    """Size of the upload; `None` while it is not known."""

    def completes(self, received: int) -> bool:
        """Whether the upload is complete now that `received` bytes of it have arrived."""
        return self.end is None or received == self.total


def chunk_of(headers: Mapping[str, str]) -> _UploadChunk:
    """Raises `RequestProblem`: 415 for an unsupported encoding, 400 for a header that cannot be read, 413 for a body
    that is too large according to `Content-Length`."""
    is_zstd = content_coding(headers, [_ZSTD]) == _ZSTD
    digest, content_range = _weights_digest(headers.get(WEIGHTS_DIGEST)), headers.get("content-range")
    _refuse_large_body(stated_length(headers))
    return _UploadChunk(digest, is_zstd, *(() if content_range is None else _byte_range(content_range)))


def _byte_range(content_range: str) -> tuple[int, int, int | None]:
    """The offsets of the first byte and after the last one, and the size of the upload where it is known."""
    match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", content_range)
    if match is None:
        raise unreadable_body(f"Content-Range {content_range!r} is not of the form bytes first-last/total")
    first, last = int(match[1]), int(match[2])
    total = None if match[3] == "*" else int(match[3])
    if last < first or (total is not None and last >= total):
        raise unreadable_body(f"Content-Range {content_range!r} contradicts itself")
    return first, last + 1, total


def _weights_digest(value: str | None) -> str | None:
    """Raises `RequestProblem`: 400, the value is not of the form of the header."""
    if value is not None and re.fullmatch("[0-9a-f]{64}", value) is None:
        raise unreadable_body(f"{WEIGHTS_DIGEST} {value[:_MOST_SHOWN]!r} is not 64 hexadecimal digits in lower case")
    return value


async def checked_parts(chunk: _UploadChunk, body: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """Yields the body in parts of about `FORWARDED_BYTES`, at least one, each with its offset in the upload.

    Raises:
        RequestProblem: 413, the body is larger than `LARGEST_BODY_BYTES`.
        ChunkDamaged: the body has another length than its range; none of what is too much is yielded.
    """
    part = bytearray()
    offset = chunk.first
    async for data in body:
        part += data
        _refuse_large_body(offset + len(part) - chunk.first)
        if len(part) >= FORWARDED_BYTES:
            _refuse_length(chunk, offset + len(part), is_last=False)
            yield offset, bytes(part)
            offset += len(part)
            part.clear()
    _refuse_length(chunk, offset + len(part), is_last=True)
    yield offset, bytes(part)


def _refuse_length(chunk: _UploadChunk, end: int, is_last: bool) -> None:
    if chunk.end is not None and (end > chunk.end or (is_last and end < chunk.end)):
        message = f"{end - chunk.first} bytes came where {chunk.end - chunk.first} were due"
        raise ChunkDamaged.of("content-range", message, end)


def _refuse_large_body(size_bytes: int) -> None:
    """Raises `RequestProblem` (413) if a body has more than `LARGEST_BODY_BYTES`."""
    if size_bytes > LARGEST_BODY_BYTES:
        raise body_too_large(
            f"it has more than {LARGEST_BODY_BYTES} bytes; send it in chunks with Content-Range, as the client does"
        )
