"""Measures for how long a step keeps the event loop from running anything else."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

BEAT_S = 0.02
Result = TypeVar("Result")


class StepTooSlow(Exception):
    """The step took longer than it may."""


async def longest_block(step: Awaitable[Result], timeout_s: float) -> tuple[Result, float]:
    """Awaits the step and measures the longest time in seconds for which the event loop did not get to run.

    Blocks shorter than `BEAT_S` are not seen, longer ones up to `BEAT_S` too short.

    Raises:
        StepTooSlow: the step takes longer than `timeout_s`; it is cancelled.
        Exception: what the step raises.
    """
    longest_s = 0.0
    task = asyncio.ensure_future(step)
    started = last = time.monotonic()
    try:
        while not task.done():
            if last - started > timeout_s:
                raise StepTooSlow
            await asyncio.wait([task], timeout=BEAT_S)
            now = time.monotonic()
            longest_s, last = max(longest_s, now - last - BEAT_S), now
        return task.result(), longest_s
    finally:
        task.cancel()
