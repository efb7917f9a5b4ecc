"""The body of a request: read within its bound, decompressed where it came compressed."""

import asyncio
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import zstandard
from fastapi import Request

from service.responses.problems import RequestProblem, unreadable_body

LARGEST_ZSTD_WINDOW_BYTES = 8 * 2**20
"""What RFC 9659 allows a body to ask for."""
COMPRESSED_SLICE_BYTES = 1024
"""Decompressed at a time: gzip makes at most a MiB of it, zstd 32 MiB."""


class Frame(Protocol):
    """One gzip member or zstd frame being decompressed."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def gzip_member() -> Frame:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)


def zstd_frame() -> Frame:
    return zstandard.ZstdDecompressor(max_window_size=LARGEST_ZSTD_WINDOW_BYTES).decompressobj()


CODINGS: dict[str, Callable[[], Frame]] = {"gzip": gzip_member, "x-gzip": gzip_member, "zstd": zstd_frame}


class Decompression:
    """One member or frame after another, as both formats allow."""

    def __init__(self, coding: str) -> None:
        self._start = CODINGS[coding]
        self._frame = self._start()

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """What the next bytes of the body become; raises `zlib.error` or `ZstdError` where they are something else."""
        for begin in range(0, len(chunk), COMPRESSED_SLICE_BYTES):
            rest = chunk[begin : begin + COMPRESSED_SLICE_BYTES]
            while rest:
                if self._frame.eof:
                    self._frame = self._start()
                yield self._frame.decompress(rest)
                rest = self._frame.unused_data

    @property
    def is_whole(self) -> bool:
        return self._frame.eof


class Body:
    """Takes in what arrives; holds at most `most_bytes` of it and what one slice of compressed bytes makes."""

    def __init__(self, coding: str, most_bytes: int) -> None:
        self.content = bytearray()
        self._coding = coding
        self._most_bytes = most_bytes
        self._decompression = None if coding == "identity" else Decompression(coding)

    async def add(self, chunk: bytes) -> None:
        """Raises `RequestProblem` once the body is known to be too large, or not what it says it is."""
        if self._decompression is None:
            self._take(chunk)
            return
        try:
            await asyncio.to_thread(self._decompress, self._decompression, chunk)
        except (zlib.error, zstandard.ZstdError) as error:
            raise unreadable_body(f"it is not the {self._coding} that Content-Encoding says: {error}") from error

    def whole(self) -> bytearray:
        """Raises `RequestProblem` if it breaks off."""
        if self._decompression is not None and not self._decompression.is_whole:
            raise unreadable_body(f"its {self._coding} breaks off; send it whole")
        return self.content

    def _decompress(self, decompression: Decompression, chunk: bytes) -> None:
        for piece in decompression.pieces(chunk):
            self._take(piece)

    def _take(self, piece: bytes) -> None:
        self.content += piece
        if len(self.content) > self._most_bytes:
            raise too_large(self._most_bytes)


async def read_body(request: Request, most_bytes: int) -> bytearray:
    """The body, decompressed.

    Raises `RequestProblem` as soon as it is known to be larger than `most_bytes`, or cannot be read.
    """
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", *CODINGS):
        raise unreadable_body(f"Content-Encoding {coding!r} is not read here; send gzip, zstd or the body as it is")
    if int(request.headers.get("content-length", 0)) > most_bytes:
        raise too_large(most_bytes)
    body = Body(coding, most_bytes)
    async for chunk in request.stream():
        await body.add(chunk)
    return body.whole()


def too_large(most_bytes: int) -> RequestProblem:
    return unreadable_body(f"larger than the limit of {most_bytes} bytes; split the request")
