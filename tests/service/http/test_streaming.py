"""Bodies that are made part by part."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from service.http.streaming import response_in_parts

HELD = memoryview(b"def")


def test_each_part_is_made_in_a_thread() -> None:
    threads: list[int] = []

    def parts() -> Iterator[bytes | memoryview]:
        for part in (b"abc", b"", HELD):
            threads.append(threading.get_ident())
            yield part

    async def sent() -> list[Any]:
        response = await response_in_parts(parts(), "text/plain")
        assert len(threads) == 1
        assert response.media_type == "text/plain"
        return [part async for part in response.body_iterator]

    found = asyncio.run(sent())
    assert [(type(part), part) for part in found] == [(bytes, b"abc"), (bytes, b""), (bytes, b"def")]
    assert len(threads) == 3
    assert threading.get_ident() not in threads


def test_an_error_of_the_first_part_is_raised_before_there_is_a_response() -> None:
    def parts() -> Iterator[bytes]:
        yield bytes(1 // 0)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(response_in_parts(parts(), "text/plain"))
