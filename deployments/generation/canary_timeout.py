"""A bound on how long a replica tries new weights, so that it can go on with others."""

import asyncio
from collections.abc import Awaitable

from deployments.failures import GenerationLost


async def with_timeout(canary: Awaitable[None], timeout_s: float) -> None:
    """Raises `GenerationLost` after `timeout_s` seconds; the canary is cancelled then."""
    try:
        async with asyncio.timeout(timeout_s):
            await canary
    except TimeoutError:
        raise GenerationLost(f"The canary took longer than {timeout_s:g} s.") from None
