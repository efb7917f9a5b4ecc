"""Reads the body of a request: its type, its encoding, and its bytes, whose decompressed size is bounded.

The headers are checked first. The JSON bodies of `/policy`, `/jobs` and `/sessions` are refused for the same reasons
and with the same messages as that of `/rollout`.
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from typing import Any

import zstandard
from fastapi import Request

from rollout_client.contract.base import FieldProblem
from rollout_client.contract.policy import SAFETENSORS
from service.problems import (
    BODY_STALLED,
    Model,
    RequestProblem,
    body_too_large,
    parsed_model,
    unreadable_body,
    unsupported_media_type,
)

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
"""The default type of `curl -d`."""
OCTETS = "application/octet-stream"
IDENTITY = "identity"
MOST_DIGITS = 18


def refuse_other_than_json(headers: Mapping[str, str]) -> None:
    """Raises `RequestProblem` (415) unless the body is JSON or has no type. `FORM` is taken as JSON too: the service
    reads no forms."""
    _media_type(headers, FORM, JSON)


def weights_media_type(headers: Mapping[str, str]) -> str:
    """`JSON` for a `CheckpointSource` or `SAFETENSORS` for weights, which is also the default.

    Raises:
        RequestProblem: 415, the body has another type.
    """
    return _media_type(headers, OCTETS, SAFETENSORS, JSON)


def _media_type(headers: Mapping[str, str], synonym: str, default: str, *others: str) -> str:
    """The type of the body; `default` also where it has none, or the `synonym`."""
    given = media_type_of(headers)
    if given in ("", synonym, default):
        return default
    if given in others:
        return given
    raise unsupported_media_type("content-type", given, [default, *others])


def content_coding(headers: Mapping[str, str], supported: Collection[str]) -> str:
    """The `Content-Encoding`, by default `IDENTITY`; `x-gzip` is `gzip` (RFC 9110).

    Raises:
        RequestProblem: 415, the encoding is not among `supported`.
    """
    given = headers.get("content-encoding", "").strip().lower().removeprefix("x-") or IDENTITY
    if given not in (IDENTITY, *supported):
        raise unsupported_media_type("content-encoding", given, [*supported, "the body without an encoding"])
    return given


def stated_length(headers: Mapping[str, str]) -> int:
    """The `Content-Length` in bytes; 0 if there is none.

    Raises:
        RequestProblem: 400, it is not a number of bytes.
    """
    given = headers.get("content-length", "0")
    if not (given.isascii() and given.isdigit() and len(given) <= MOST_DIGITS):
        raise unreadable_body(f"Content-Length {given[:MOST_DIGITS]!r} is not a number of bytes")
    return int(given)


def media_type_of(headers: Mapping[str, str]) -> str:
    """The `Content-Type` without its parameters, in lower case; empty if there is none."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


LARGEST_ZSTD_WINDOW_BYTES = 8 * 2**20
"""The largest window that RFC 9659 allows a content encoding to ask for."""
COMPRESSED_SLICE_BYTES = 1024
"""Compressed bytes that are decompressed in one step: gzip makes at most 1 MiB of them, zstd at most 32 MiB."""

SPLIT = "split the request"
STALLED_AFTER_S = 60.0
"""Longest silence of a client: others need what it has reserved."""
LEAST_BYTES_PER_S = 64 * 2**10
"""Least rate after the first `STALLED_AFTER_S`. A body that arrives more slowly, as a byte a minute, is refused."""


CODINGS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS),
    "zstd": lambda: zstandard.ZstdDecompressor(max_window_size=LARGEST_ZSTD_WINDOW_BYTES).decompressobj(),
}
"""By encoding, a decompressor of one gzip member or one zstd frame."""


class _BodyBuffer:
    """Collects a body. Holds at most `most_bytes` of it and the decompressed bytes of one slice."""

    def __init__(
        self, coding: str, most_bytes: int, advice: str = SPLIT, hold: Callable[[int], None] = lambda _: None
    ) -> None:
        """`hold` is called, perhaps in another thread, with the size that the body is about to have."""
        self._content = bytearray()
        self._coding = coding
        self._most_bytes = most_bytes
        self._advice = advice
        self._hold = hold
        self._frame: Any = None if coding == IDENTITY else CODINGS[coding]()
        """The member or frame that is decompressed now; `None` for a body without an encoding."""

    async def add(self, chunk: bytes) -> None:
        """Raises `RequestProblem`: 413 once the body is over the bound, 400 if it is not in its encoding."""
        if self._frame is None:
            self._append(chunk)
            return
        try:
            await asyncio.to_thread(self._decompress, chunk)
        except (zlib.error, zstandard.ZstdError) as error:
            message = f"it is not the {self._coding} that Content-Encoding says: {error}"
            raise unreadable_body(message) from error

    def complete(self) -> bytearray:
        """The whole body; raises `RequestProblem` (400) if its compressed data breaks off."""
        if self._frame is not None and not self._frame.eof:
            raise unreadable_body(f"its {self._coding} breaks off; send it whole")
        return self._content

    def _decompress(self, chunk: bytes) -> None:
        """Decompresses consecutive members or frames, which both formats allow."""
        try:
            for begin in range(0, len(chunk), COMPRESSED_SLICE_BYTES):
                rest = chunk[begin : begin + COMPRESSED_SLICE_BYTES]
                while rest:
                    if self._frame.eof:
                        self._frame = CODINGS[self._coding]()
                    self._append(self._frame.decompress(rest))
                    rest = self._frame.unused_data
        except RequestProblem:
            # In this thread: freeing 256 MB takes 20 ms.
            self._content.clear()
            raise

    def _append(self, data: bytes) -> None:
        size = len(self._content) + len(data)
        if size > self._most_bytes:
            raise _over_limit(self._most_bytes, self._advice)
        self._hold(size)
        self._content += data


async def read_body(
    request: Request, most_bytes: int, advice: str = SPLIT, hold: Callable[[int], None] = lambda _: None
) -> bytearray:
    """Reads the body and decompresses it.

    Args:
        advice: what to do with a body that is too large.
        hold: is called, perhaps in another thread, with the decompressed size before the body grows to it.

    Raises:
        RequestProblem: 413 as soon as the body is known to be larger than `most_bytes`, 415 if its `Content-Encoding`
            is not supported, 400 if it is not in that encoding, 408 if nothing of it arrives for `STALLED_AFTER_S`, or
            less than `LEAST_BYTES_PER_S`; what `hold` raises.
    """
    coding = content_coding(request.headers, CODINGS)
    if stated_length(request.headers) > most_bytes:
        raise _over_limit(most_bytes, advice)
    buffer = _BodyBuffer(coding, most_bytes, advice, hold)
    async with aclosing(_chunks_in_time(request.stream())) as chunks:
        async for chunk in chunks:
            await buffer.add(chunk)
    return buffer.complete()


async def _chunks_in_time(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Raises `RequestProblem` (408) after `STALLED_AFTER_S` without a chunk, or if they come too slowly."""
    now_s = asyncio.get_running_loop().time
    allowed_s = STALLED_AFTER_S
    """Time that is left for the chunks to come."""
    while True:
        began_s = now_s()
        try:
            async with asyncio.timeout(min(allowed_s, STALLED_AFTER_S)):
                chunk = await anext(chunks, None)
        except TimeoutError as error:
            reason = f"nothing of it arrived for {STALLED_AFTER_S:g} s; send it again"
            if allowed_s < STALLED_AFTER_S:
                reason = f"less than {LEAST_BYTES_PER_S} bytes of it arrived per second; send it again, and faster"
            raise RequestProblem(BODY_STALLED, [FieldProblem(field="body", message=reason)]) from error
        if chunk is None:
            return
        # Without the time that the service takes for it.
        allowed_s += len(chunk) / LEAST_BYTES_PER_S - (now_s() - began_s)
        yield chunk


def _over_limit(most_bytes: int, advice: str) -> RequestProblem:
    return body_too_large(f"it is larger than the limit of {most_bytes} bytes; {advice}")


async def read_json_body(request: Request, model: type[Model], most_bytes: int, advice: str) -> Model:
    """The body as `model`. `advice` says what to do with one of more than `most_bytes`.

    Raises:
        RequestProblem: 400 for a body that is not JSON or not in its encoding, 413 for one that is too large, 415 for
            an unsupported type or encoding, 422 for fields that are wrong.
    """
    refuse_other_than_json(request.headers)
    return parsed_model(await read_body(request, most_bytes, advice), model)
