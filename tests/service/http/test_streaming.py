"""Bodies that are made part by part."""

import threading
from collections.abc import Iterator

from service.http.streaming import response_in_parts

HELD = memoryview(b"def")


async def test_each_part_is_made_in_a_thread() -> None:
    threads: list[int] = []

    def parts() -> Iterator[bytes | memoryview]:
        for part in (b"abc", b"", HELD):
            threads.append(threading.get_ident())
            yield part

    response = await response_in_parts(parts(), "text/plain")
    assert len(threads) == 1
    assert response.media_type == "text/plain"
    sent = [(type(part), part) async for part in response.body_iterator]
    assert sent == [(bytes, b"abc"), (bytes, b""), (bytes, b"def")]
    assert len(threads) == 3
    assert threading.get_ident() not in threads
