"""Bodies of responses that are sent part by part: made beside other requests, and kept alive by heartbeats.

Proxies close connections that are silent for long.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing

from fastapi.responses import StreamingResponse


async def response_in_parts(parts: Iterator[bytes | memoryview], media_type: str) -> StreamingResponse:
    """Each part is made in a thread, the first one before the status is sent: what it raises can become a problem
    document.

    Starlette makes the parts of a generator in threads too, those of anyio. In Ray's event loop anyio starts a thread
    for nearly each part, and for each thread it looks through all tasks of the loop: with a thousand requests, the loop
    stands still for a tenth of a second.
    """
    first = await asyncio.to_thread(next, parts)
    return StreamingResponse(_made_in_threads(first, parts), media_type=media_type)


async def _made_in_threads(
    first: bytes | memoryview, further: Iterator[bytes | memoryview]
) -> AsyncGenerator[bytes, None]:
    part: bytes | memoryview | None = first
    while part is not None:
        # Serve's proxy accepts only `bytes`.
        yield bytes(part)
        del part
        part = await asyncio.to_thread(next, further, None)


EMPTY_LINE = b"\n"
"""Heartbeat of a stream of JSON lines; readers skip it."""
SSE = "text/event-stream"
SSE_HEARTBEAT = b":\n\n"
"""An empty comment between server-sent events; readers skip it."""
PERIOD_S = 15.0
"""Default period. Proxies commonly close a connection that is silent for 60 s."""


class HeartbeatStream(AsyncIterator[bytes]):
    """The parts, and between them `heartbeat` whenever none has come for `period_s` seconds, if that is not `None`.

    The reader closes it outside of any cancelled scope, because a part may be under way when the reader is cancelled.
    """

    def __init__(self, parts: AsyncGenerator[bytes, None], period_s: float | None, heartbeat: bytes) -> None:
        self._parts = parts
        self._period_s = period_s
        self._heartbeat = heartbeat
        self._following: asyncio.Future[bytes | None] | None = None

    async def __anext__(self) -> bytes:
        if self._following is None:
            self._following = asyncio.ensure_future(anext(self._parts, None))
        done, _ = await asyncio.wait({self._following}, timeout=self._period_s)
        if not done:
            return self._heartbeat
        part, self._following = self._following.result(), None
        if part is None:
            raise StopAsyncIteration
        return part

    async def aclose(self) -> None:
        """Closes the parts too, also while one is under way."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        await self._parts.aclose()


async def with_heartbeats(
    parts: AsyncGenerator[bytes, None], period_s: float | None, heartbeat: bytes = EMPTY_LINE
) -> AsyncIterator[bytes]:
    """As `HeartbeatStream`, which this closes."""
    async with aclosing(HeartbeatStream(parts, period_s, heartbeat)) as stream:
        async for part in stream:
            yield part
