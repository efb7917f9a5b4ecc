"""Keeps a stream alive through proxies that close connections which are silent."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

EMPTY_LINE = b"\n"
"""Of a stream of JSON lines; readers pass over it."""


async def with_heartbeats(
    parts: AsyncGenerator[bytes, None], period_s: float | None, heartbeat: bytes = EMPTY_LINE
) -> AsyncIterator[bytes]:
    """The parts, and between them `heartbeat` whenever none has come for `period_s` seconds; never, if it is `None`."""
    if period_s is None:
        async for part in parts:
            yield part
        return
    following: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            if following is None:
                following = asyncio.create_task(anext_or_none(parts))
            done, _ = await asyncio.wait({following}, timeout=period_s)
            if not done:
                yield heartbeat
                continue
            result, following = following.result(), None
            if result is None:
                return
            yield result
    finally:
        if following is not None:
            following.cancel()
            await asyncio.wait({following})
        await parts.aclose()


async def anext_or_none(parts: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(parts, None)
