"""Bodies of responses that are made part by part, beside other requests."""

import asyncio
from collections.abc import AsyncGenerator, Iterator

from fastapi.responses import StreamingResponse


async def response_in_parts(parts: Iterator[bytes | memoryview], media_type: str) -> StreamingResponse:
    """Each part is made in a thread, the first one before the status is sent: what it raises can become a problem
    document.

    Starlette makes the parts of a generator in threads too, those of anyio. In Ray's event loop anyio starts a thread
    for nearly each part, and for each thread it looks through all tasks of the loop: with a thousand requests, the loop
    stands still for a tenth of a second.
    """
    first = await asyncio.to_thread(next, parts)
    return StreamingResponse(made_in_threads(first, parts), media_type=media_type)


async def made_in_threads(
    first: bytes | memoryview, further: Iterator[bytes | memoryview]
) -> AsyncGenerator[bytes, None]:
    part: bytes | memoryview | None = first
    while part is not None:
        # Serve's proxy accepts only `bytes`.
        yield bytes(part)
        del part
        part = await asyncio.to_thread(next, further, None)
