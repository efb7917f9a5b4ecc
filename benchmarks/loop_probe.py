"""The longest gap of an event loop, as a timer on the loop sees it."""

import asyncio
import time

TICK_S = 0.001


class LoopProbe:
    """Ticks every millisecond on the event loop and keeps the longest time between two ticks.

    The ticks are timers. A task that sleeps would go on one iteration of the loop after its timer, and see two
    iterations as one gap.
    """

    def __init__(self) -> None:
        self._is_ticking = False
        self._cpu_at = self._wall_at = 0.0
        """When it ticked last."""
        self._forget()

    def restart(self) -> None:
        self._forget()
        if not self._is_ticking:
            self._is_ticking = True
            self._next_tick()

    def gaps(self) -> dict[str, float]:
        """Longest gaps in milliseconds: the processor time of the event loop's thread, and the wall time."""
        return {"cpu_ms": 1000 * self._cpu_s, "wall_ms": 1000 * self._wall_s}

    def _forget(self) -> None:
        self._cpu_s = self._wall_s = 0.0

    def _next_tick(self) -> None:
        self._cpu_at, self._wall_at = time.thread_time(), time.perf_counter()
        asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._cpu_s = max(self._cpu_s, time.thread_time() - self._cpu_at)
        self._wall_s = max(self._wall_s, time.perf_counter() - self._wall_at)
        self._next_tick()
