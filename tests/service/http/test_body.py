"""Bodies are read within their bound, decompressed, and refused with the status that says why."""

import asyncio
import gzip
import random
import threading
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import zstandard
from fastapi import Request
from starlette.types import Message

from service.http.request_body import (
    COMPRESSED_SLICE_BYTES,
    LARGEST_ZSTD_WINDOW_BYTES,
    LEAST_BYTES_PER_S,
    STALLED_AFTER_S,
    read_body,
)
from service.problems import RequestProblem
from tests import virtual_time
from tests.service.http.http_requests import http_request
from tests.service.scripted_http import named

Compress = Callable[[bytes], bytes]
COMPRESSIONS = [("gzip", gzip.compress), ("zstd", zstandard.compress)]
TEXT = b"one two three " * 40


def read(*chunks: bytes, most_bytes: int = 10_000, **headers: str) -> bytes:
    return bytes(asyncio.run(read_body(http_request(chunks, named(headers)), most_bytes)))


def refused(*chunks: bytes, most_bytes: int = 10_000, **headers: str) -> tuple[int, str]:
    """The status of the refusal, and its message."""
    with pytest.raises(RequestProblem) as raised:
        read(*chunks, most_bytes=most_bytes, **headers)
    [error] = raised.value.problem.errors
    return raised.value.problem.status, error.message


@pytest.mark.parametrize(("coding", "compress"), [("identity", bytes), *COMPRESSIONS])
def test_the_size_of_a_body_is_told_before_the_body_has_it(coding: str, compress: Compress) -> None:
    body = compress(random.Random(0).randbytes(3 * COMPRESSED_SLICE_BYTES))
    told: list[int] = []
    threads: set[int] = set()

    class Full(Exception):
        pass

    def hold(size: int) -> None:
        told.append(size)
        threads.add(threading.get_ident())
        if size > 2 * COMPRESSED_SLICE_BYTES:
            raise Full

    chunks = [body[begin : begin + 500] for begin in range(0, len(body), 500)]
    request = http_request(chunks, {"content-encoding": coding})
    with pytest.raises(Full):
        asyncio.run(read_body(request, 10_000, hold=hold))
    assert (threading.get_ident() in threads) == (coding == "identity")
    assert told == sorted(told)
    assert 2 * COMPRESSED_SLICE_BYTES < told[-1] <= 3 * COMPRESSED_SLICE_BYTES


def arriving(chunk: bytes, every_s: float, chunks: int) -> bytes:
    """Reads a body of so many chunks. One of tiny chunks goes on after them, and nothing of it comes any more."""
    left = chunks

    async def receive() -> Message:
        nonlocal left
        if left == 0:
            await asyncio.Event().wait()
        await asyncio.sleep(every_s)
        left -= 1
        return {"type": "http.request", "body": chunk, "more_body": left > 0 or len(chunk) < 10}

    request = Request({"type": "http", "method": "POST", "path": "/rollout", "headers": []}, receive)
    return bytes(virtual_time.run(read_body(request, 10**9)))


@pytest.mark.parametrize(
    ("every_s", "chunks", "says"),
    [
        (0, 1, "nothing of it arrived for 60 s; send it again."),
        (
            STALLED_AFTER_S - 1,
            1000,
            f"less than {LEAST_BYTES_PER_S} bytes of it arrived per second; send it again, and faster.",
        ),
    ],
)
def test_a_body_that_stops_arriving_or_comes_too_slowly_is_refused(every_s: float, chunks: int, says: str) -> None:
    with pytest.raises(RequestProblem) as raised:
        arriving(b"x", every_s, chunks)
    assert (raised.value.problem.status, raised.value.problem.detail) == (408, f"body: {says}")


def test_a_body_may_take_as_long_as_its_size_at_the_least_rate() -> None:
    assert len(arriving(bytes(2 * LEAST_BYTES_PER_S), 2, 100)) == 200 * LEAST_BYTES_PER_S


@pytest.mark.parametrize(("coding", "compress"), COMPRESSIONS)
def test_a_compressed_body_is_decompressed_however_it_was_cut(coding: str, compress: Compress) -> None:
    compressed = compress(TEXT)
    for size in (1, 7, len(compressed)):
        chunks = [compressed[begin : begin + size] for begin in range(0, len(compressed), size)]
        assert read(*chunks, content_encoding=coding) == TEXT


@pytest.mark.parametrize(("coding", "compress"), COMPRESSIONS)
def test_consecutive_frames_are_one_body(coding: str, compress: Compress) -> None:
    assert read(compress(TEXT[:30]) + compress(TEXT[30:]), content_encoding=coding) == TEXT


@pytest.mark.parametrize("coding", [" GZip ", "x-gzip", "identity", "", None])
def test_the_encoding_of_a_body_has_several_names_and_none(coding: str | None) -> None:
    body = gzip.compress(TEXT) if coding and "gzip" in coding.lower() else TEXT
    headers: dict[str, Any] = {} if coding is None else {"content_encoding": coding}
    assert read(body[:9], b"", body[9:], **headers) == TEXT


@pytest.mark.parametrize(("coding", "compress"), [("identity", bytes), *COMPRESSIONS])
def test_a_body_may_have_exactly_the_bound_and_not_a_byte_more(coding: str, compress: Compress) -> None:
    assert read(compress(TEXT), most_bytes=len(TEXT), content_encoding=coding) == TEXT
    expected = (413, f"it is larger than the limit of {len(TEXT)} bytes; split the request")
    assert refused(compress(TEXT + b"x"), most_bytes=len(TEXT), content_encoding=coding) == expected


@pytest.mark.parametrize(("coding", "compress"), COMPRESSIONS)
def test_a_body_that_breaks_off_is_400(coding: str, compress: Compress) -> None:
    expected = (400, f"its {coding} breaks off; send it whole")
    assert refused(compress(TEXT)[:-1], content_encoding=coding) == expected
    assert refused(b"", content_encoding=coding) == expected


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_a_body_in_another_format_than_it_says_is_400(coding: str) -> None:
    status, message = refused(b"{}", content_encoding=coding)
    assert status == 400
    assert message.startswith(f"it is not the {coding} that Content-Encoding says: ")


def zstd_with_window(window_log: int) -> bytes:
    """A small frame whose header asks for a window of `2**window_log` bytes."""
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log)
    compression = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compression.compress(TEXT) + compression.flush()


def test_a_zstd_frame_may_ask_for_a_window_of_8_mib_and_for_no_larger_one() -> None:
    assert LARGEST_ZSTD_WINDOW_BYTES == 2**23
    assert read(zstd_with_window(23), content_encoding="zstd") == TEXT
    status, message = refused(zstd_with_window(24), content_encoding="zstd")
    assert status == 400
    assert message.startswith("it is not the zstd that Content-Encoding says: ")


@pytest.mark.parametrize(("coding", "compress"), [("gzip", partial(gzip.compress, compresslevel=1)), COMPRESSIONS[1]])
def test_a_bomb_is_refused_before_it_fills_the_memory(coding: str, compress: Callable[[bytes], bytes]) -> None:
    bomb = compress(bytes(2**28))
    tracemalloc.start()
    status, _ = refused(bomb, most_bytes=2**21, content_encoding=coding)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert status == 413
    assert peak < 2**26
