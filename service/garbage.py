"""Keeps Python's garbage collector from holding the event loop while thousands of rollouts run.

A full collection looks at every object of the process, which takes seconds with the objects of 60,000 rollouts, and
finds nothing: they all live. So full collections wait until no rollout runs. Young objects are collected as always, in
small portions.
"""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 2_000
"""New objects that start a collection of the new objects: 1 to 10 ms, the more the larger they are."""
YOUNG_COLLECTIONS = 2
"""Collections of new objects after which what they left is collected again."""
NEVER = 2**30
IDLE_S = 1.0
LONGEST_WAIT_S = 600.0
"""Time without a full collection after which one is made although rollouts run."""


def collect_small_portions() -> None:
    """What exists now, such as imported modules, is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, NEVER)


class FullCollections:
    """Makes a full collection when no rollout has run for `IDLE_S` seconds, and after `LONGEST_WAIT_S` in any case."""

    def __init__(self) -> None:
        self._running = 0
        self._due: asyncio.TimerHandle | None = None
        self._last_at = time.monotonic()

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """No full collection is made in the block. Blocks may overlap."""
        self._running += 1
        if self._due is not None:
            self._due.cancel()
            self._due = None
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._due = asyncio.get_running_loop().call_later(IDLE_S, self._collect)
            elif time.monotonic() - self._last_at > LONGEST_WAIT_S:
                self._collect()

    def _collect(self) -> None:
        self._due = None
        gc.collect()
        self._last_at = time.monotonic()
