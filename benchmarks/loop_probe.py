"""The longest gap of an event loop, as a timer on the loop sees it."""

import asyncio
import time
from typing import Any

from benchmarks.loop_stacks import LoopStacks

TICK_S = 0.001


class LoopProbe:
    """Ticks every millisecond on the event loop and keeps the longest time between two ticks.

    The ticks are timers. A task that sleeps would go on one iteration of the loop after its timer, and see two
    iterations as one gap.
    """

    def __init__(self, with_stacks: bool) -> None:
        self._with_stacks = with_stacks
        self._stacks: LoopStacks | None = None
        self._is_ticking = False
        self._cpu_at = self._wall_at = 0.0
        """When it ticked last."""
        self._forget()

    def restart(self) -> None:
        self._forget()
        if not self._is_ticking:
            self._is_ticking = True
            self._stacks = LoopStacks() if self._with_stacks else None
            self._next_tick()

    def gaps(self) -> dict[str, Any]:
        """Longest gaps in milliseconds: the processor time of the event loop's thread, and the wall time.

        `stacks` has what was executed in the former, with the milliseconds of each.
        """
        return {"cpu_ms": 1000 * self._cpu_s, "wall_ms": 1000 * self._wall_s, "stacks": self._in_longest}

    def _forget(self) -> None:
        self._cpu_s = self._wall_s = 0.0
        self._in_longest: dict[str, float] = {}

    def _next_tick(self) -> None:
        self._cpu_at, self._wall_at = time.thread_time(), time.perf_counter()
        asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        cpu_s, wall_s = time.thread_time() - self._cpu_at, time.perf_counter() - self._wall_at
        seen = self._stacks.take() if self._stacks else {}
        if cpu_s > self._cpu_s:
            self._cpu_s, self._in_longest = cpu_s, seen
        self._wall_s = max(self._wall_s, wall_s)
        self._next_tick()
