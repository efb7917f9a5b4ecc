"""Keeps a stream alive through proxies that close connections which are silent."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

EMPTY_LINE = b"\n"
"""Of a stream of JSON lines; readers pass over it."""
SSE = "text/event-stream"
SSE_HEARTBEAT = b":\n\n"
"""An empty comment between server-sent events; readers pass over it."""
PERIOD_S = 15.0
"""Where the caller does not say. Proxies commonly close a connection that is silent for 60 s."""


class HeartbeatStream(AsyncIterator[bytes]):
    """The parts, and between them `heartbeat` whenever none has come for `period_s` seconds.

    Whoever reads it closes it, outside of what may be cancelled: a part may be under way when the reader is cancelled.
    """

    def __init__(self, parts: AsyncGenerator[bytes, None], period_s: float, heartbeat: bytes) -> None:
        self._parts = parts
        self._period_s = period_s
        self._heartbeat = heartbeat
        self._following: asyncio.Task[bytes | None] | None = None

    async def __anext__(self) -> bytes:
        if self._following is None:
            self._following = asyncio.create_task(anext_or_none(self._parts))
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
    """As `HeartbeatStream`, which this closes; without any heartbeat if `period_s` is `None`."""
    if period_s is None:
        async for part in parts:
            yield part
        return
    async with aclosing(HeartbeatStream(parts, period_s, heartbeat)) as stream:
        async for part in stream:
            yield part


async def anext_or_none(parts: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(parts, None)
