"""Bodies that are made part by part."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

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

    assert [(type(part), part) for part in asyncio.run(sent())] == [(bytes, b"abc"), (bytes, b""), (bytes, b"def")]
    assert len(threads) == 3
    assert threading.get_ident() not in threads
