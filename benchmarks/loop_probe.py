"""The longest gap of an event loop, as a task on the loop sees it."""

import asyncio
import time
from typing import Any

from benchmarks.loop_stacks import LoopStacks

TICK_S = 0.001


class LoopProbe:
    """Ticks every millisecond on the event loop and keeps the longest time between two ticks."""

    def __init__(self, with_stacks: bool) -> None:
        self._with_stacks = with_stacks
        self._stacks: LoopStacks | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._forget()

    def restart(self) -> None:
        self._forget()
        if self._ticking is None:
            self._stacks = LoopStacks() if self._with_stacks else None
            self._ticking = asyncio.create_task(self._tick())

    def gaps(self) -> dict[str, Any]:
        """Longest gaps in milliseconds: the processor time of the event loop's thread, and the wall time.

        `stacks` has what was executed in the former, with the milliseconds of each.
        """
        return {"cpu_ms": 1000 * self._cpu_s, "wall_ms": 1000 * self._wall_s, "stacks": self._in_longest}

    def _forget(self) -> None:
        self._cpu_s = self._wall_s = 0.0
        self._in_longest: dict[str, float] = {}

    async def _tick(self) -> None:
        cpu, wall = time.thread_time(), time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            cpu_now, wall_now = time.thread_time(), time.perf_counter()
            seen = self._stacks.take() if self._stacks else {}
            if cpu_now - cpu > self._cpu_s:
                self._cpu_s, self._in_longest = cpu_now - cpu, seen
            self._wall_s = max(self._wall_s, wall_now - wall)
            cpu, wall = cpu_now, wall_now
