"""Reads one chunk of a weight upload: its headers, and its bytes, which are checked against the headers."""

import base64
import hashlib
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.policy.failures import ChunkDamaged
from rollout_client.contract.policy import WEIGHTS_DIGEST
from service.http.request_body import content_coding, stated_length
from service.problems import body_too_large, unreadable_body

ZSTD = "zstd"
FORWARDED_BYTES = 4 * 2**20
"""Bytes per call of the policy store."""
LARGEST_BODY_BYTES = 256 * 2**20
"""Serve's proxy keeps in its memory what the policy store has not received yet."""
OTHER_DIGEST = (
    "Repr-Digest is not verified; send the Content-Digest of each body, or as the client does the Weights-Digest "
    "of the file, with its last chunk"
)
MOST_SHOWN = 80
"""Characters of a header in a message."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`Content-Range`: bytes `[first, end)` of an upload of `total` bytes; `None` while the total is not known."""

    first: int
    end: int
    total: int | None


@dataclass(frozen=True, slots=True)
class UploadChunk:
    """Description of a request's body by its headers. Digests are in hex."""

    range: ByteRange | None
    """`None` for a body that is the whole upload."""
    digest: str | None
    """Sha-256 of this body (`Content-Digest`)."""
    weights_digest: str | None
    """Digest of the file that the whole upload makes (`Weights-Digest`)."""
    is_zstd: bool

    @property
    def first(self) -> int:
        """Offset of the first byte of the chunk in the upload."""
        return 0 if self.range is None else self.range.first

    def total_after(self, end: int) -> int | None:
        """Size of the whole upload, where the chunk tells it; `end` is the offset after the chunk's last byte."""
        return end if self.range is None else self.range.total

    def completes(self, received: int) -> bool:
        """Whether the upload is complete now that `received` bytes of it have arrived."""
        return self.range is None or received == self.range.total


def chunk_of(headers: Mapping[str, str]) -> UploadChunk:
    """Raises `RequestProblem`: 415 for an unsupported encoding, 400 for a header that cannot be read, 413 for a body
    that is too large according to `Content-Length`."""
    coding = content_coding(headers, [ZSTD])
    if "repr-digest" in headers:
        raise unreadable_body(OTHER_DIGEST)
    content_range = headers.get("content-range")
    chunk = UploadChunk(
        range=None if content_range is None else byte_range(content_range),
        digest=content_digest(headers.get("content-digest")),
        weights_digest=weights_digest(headers.get(WEIGHTS_DIGEST)),
        is_zstd=coding == ZSTD,
    )
    refuse_large_body(stated_length(headers))
    return chunk


def byte_range(content_range: str) -> ByteRange:
    match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", content_range)
    if match is None:
        raise unreadable_body(f"Content-Range {content_range!r} is not of the form bytes first-last/total")
    first, last = int(match[1]), int(match[2])
    total = None if match[3] == "*" else int(match[3])
    if last < first or (total is not None and last >= total):
        raise unreadable_body(f"Content-Range {content_range!r} contradicts itself")
    return ByteRange(first, last + 1, total)


def weights_digest(value: str | None) -> str | None:
    """Raises `RequestProblem`: 400, the value is not of the form of the header."""
    if value is not None and re.fullmatch("[0-9a-f]{64}", value) is None:
        raise unreadable_body(f"{WEIGHTS_DIGEST} {value[:MOST_SHOWN]!r} is not 64 hexadecimal digits in lower case")
    return value


def content_digest(value: str | None) -> str | None:
    """The sha-256 (hex) in the header of RFC 9530; digests of other algorithms are ignored.

    Raises:
        RequestProblem: 400, there is a sha-256 and it is not in the form of the header.
    """
    members = dict(member.strip().partition("=")[::2] for member in (value or "").split(","))
    if "sha-256" not in members:
        return None
    match = re.fullmatch(":(.*):", members["sha-256"])
    if match is None:
        raise unreadable_body("the sha-256 in content-digest does not stand between colons")
    try:
        return base64.b64decode(match[1], validate=True).hex()
    except ValueError as error:
        raise unreadable_body(f"the sha-256 in content-digest is not base64: {error}") from error


async def checked_parts(chunk: UploadChunk, body: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """Yields the body in parts of about `FORWARDED_BYTES`, at least one, each with its offset in the upload.

    The checks of length and digest come after the last part: the parts count only when the iteration ends normally.

    Raises:
        RequestProblem: 413, the body is larger than `LARGEST_BODY_BYTES`.
        ChunkDamaged: the body has another length or digest than the headers say.
    """
    digest = None if chunk.digest is None else hashlib.sha256()
    part = bytearray()
    offset = chunk.first
    async for data in body:
        if digest is not None:
            digest.update(data)
        part += data
        refuse_large_body(offset + len(part) - chunk.first)
        if len(part) >= FORWARDED_BYTES:
            yield offset, bytes(part)
            offset += len(part)
            part.clear()
    yield offset, bytes(part)
    end = offset + len(part)
    if chunk.range is not None and end != chunk.range.end:
        due = chunk.range.end - chunk.first
        raise damaged("content-range", f"{end - chunk.first} bytes came where {due} were due", end)
    if digest is not None and digest.hexdigest() != chunk.digest:
        raise damaged("content-digest", f"the body's sha-256 is {digest.hexdigest()}; send it again", chunk.digest)


def damaged(field: str, message: str, value: Any) -> ChunkDamaged:
    return ChunkDamaged.of(field, message, value)


def refuse_large_body(size_bytes: int) -> None:
    """Raises `RequestProblem` (413) if a body has more than `LARGEST_BODY_BYTES`."""
    if size_bytes > LARGEST_BODY_BYTES:
        raise body_too_large(
            f"it has more than {LARGEST_BODY_BYTES} bytes; send it in chunks with Content-Range, as the client does"
        )
