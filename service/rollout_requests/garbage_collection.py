"""Keeps Python's garbage collector from holding the event loop while thousands of rollouts run.

A collection takes time in proportion to the objects that it looks at, about 0.5 µs each. A full one looks at every
object of the process, which takes seconds with the objects of 60,000 rollouts, and finds nothing: they all live. So
full collections wait until no request is in flight; until then each object is looked at once, soon after it was made.
"""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

YOUNG_OBJECTS = 2_000
"""New objects that start a collection of the new objects: for a thread that makes many in one step."""
PORTION_S = 0.02
"""Time between two collections of new objects. `YOUNG_OBJECTS` does not bound what one of them looks at: Python's count
of new objects goes down with every object that is freed, old ones too, so that 30,000 new objects can be there when it
reaches 2,000. In 20 ms an event loop makes some thousands."""
FREED_IN_ONE_STEP = 64
NEVER = 2**30
IDLE_S = 5.0
LONGEST_WAIT_S = 3600.0
"""Time after which a full collection is made although requests are in flight."""


def freeze_and_tune_collector() -> None:
    """Exempts all present objects, such as imported modules, from collection, and makes collections small."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, NEVER, NEVER)


def free_items(items: list[Any]) -> None:
    """Empties the list. In a thread: the event loop goes on between the portions."""
    while items:
        del items[-FREED_IN_ONE_STEP:]


class PacedCollections:
    """Makes the collections of one event loop.

    While a request is in flight new objects are looked at every `PORTION_S` seconds, each once. A full collection is
    made when none has been in flight for `IDLE_S` seconds.
    """

    def __init__(self) -> None:
        self._requests = 0
        self._timer: asyncio.TimerHandle | None = None
        """Set from the begin of a request until a full collection, when no request is in flight."""
        self._idle_at = self._last_full_at = 0.0
        """When the last request ended, and the last full collection, on the event loop's clock."""

    @contextmanager
    def request_in_flight(self) -> Iterator[None]:
        """Marks a request as in flight during the block. Blocks may overlap."""
        loop = asyncio.get_running_loop()
        self._requests += 1
        if self._timer is None:
            self._last_full_at = loop.time()
            self._wait_for_portion(loop)
        try:
            yield
        finally:
            self._requests -= 1
            self._idle_at = loop.time()

    def _wait_for_portion(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(PORTION_S, self._collect_portion, loop)

    def _collect_portion(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        if self._requests == 0 and now - self._idle_at >= IDLE_S:
            gc.collect()
            self._timer = None
            return
        if now - self._last_full_at >= LONGEST_WAIT_S:
            gc.collect()
            self._last_full_at = now
        else:
            gc.collect(0)
        self._wait_for_portion(loop)
