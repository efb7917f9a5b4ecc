"""A bound on how long a replica tries new weights, so that it can go on with others."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from deployments.failures import GenerationLost

Result = TypeVar("Result")


async def with_timeout(canary: Awaitable[Result], timeout_s: float) -> Result:
    """Raises `GenerationLost` after `timeout_s` seconds; the canary is cancelled then."""
    try:
        async with asyncio.timeout(timeout_s):
            return await canary
    except TimeoutError:
        raise GenerationLost(f"The canary took longer than {timeout_s:g} s.") from None
