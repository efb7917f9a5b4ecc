"""How much memory a process of the service holds."""

import asyncio
from contextlib import suppress

import psutil

POLL_S = 0.05


def replica(deployment: str) -> psutil.Process:
    """The process of a deployment that has one replica; the service runs below this very process."""
    [process] = (
        process
        for process in psutil.Process().children(recursive=True)
        if f"ServeReplica:rollout:{deployment}" in " ".join(process.cmdline())
    )
    return process


def resident_kb(process: psutil.Process) -> float:
    return float(process.memory_info().rss / 1024)


class Peak:
    """The most that a process holds between entering and leaving; `kb` is 0 before."""

    def __init__(self, process: psutil.Process) -> None:
        self.kb = 0.0
        self._process = process

    async def __aenter__(self) -> "Peak":
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching

    async def _watch(self) -> None:
        while True:
            self.kb = max(self.kb, resident_kb(self._process))
            await asyncio.sleep(POLL_S)
