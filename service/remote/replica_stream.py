"""Detects a hung replica: its heartbeats stop. The replica's half is `deployments/rpc/liveness.py`."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from deployments.rpc.liveness import HEARTBEAT_S


class ReplicaSilent(Exception):
    """Nothing came from the replica for too many heartbeats."""

    def __init__(self, heartbeats: int) -> None:
        super().__init__(heartbeats)
        self.heartbeats = heartbeats


class ReplicaWatch:
    """Breaks the open calls of one replica when nothing came on any of them for `lost_after` heartbeats.

    All calls that name the replica share one watch, whatever they ask for: the replica sends its heartbeats on one of
    them alone.

    Silence counts only after a first item: a call that waits for a replica to start is silent for minutes. It is
    counted in ticks of this event loop, so that a loop that was itself stalled does not blame the replica.
    """

    def __init__(self, lost_after: int) -> None:
        self._lost_after = lost_after
        self._open: set[asyncio.Timeout] = set()
        self._was_heard = False
        self._silent_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[None]:
        """Watches the open call that is made in the block. Raises `ReplicaSilent` when the replica is silent."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._open.add(limit)
                if self._timer is None:
                    self._start_timer()
                yield
        except TimeoutError as error:
            if limit.expired():
                raise ReplicaSilent(self._lost_after) from error
            raise
        finally:
            self._open.discard(limit)
            if not self._open:
                self.forget()

    def note_item(self) -> None:
        """Records an item of one of the calls."""
        self._was_heard = True
        self._silent_ticks = 0

    def forget(self) -> None:
        """Forgets that the replica was heard, which may be gone: silence counts again after the next item."""
        self._was_heard = False
        self._silent_ticks = 0

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._open:
            return
        self._start_timer()
        self._silent_ticks += self._was_heard
        if self._silent_ticks >= self._lost_after:
            self.forget()
            for limit in self._open:
                limit.reschedule(asyncio.get_running_loop().time())


class ReplicaWatches:
    """The watches of a deployment's replicas, each as long as somebody has it, also while its replica is not listed."""

    def __init__(self, lost_after: int) -> None:
        """Begins without watches; `lost_after` is that of `ReplicaWatch`."""
        self._lost_after = lost_after
        self._watches: WeakValueDictionary[str, ReplicaWatch] = WeakValueDictionary()

    def watch_of(self, replica: str) -> ReplicaWatch:
        """The watch of the calls that name this replica; of those that name none, if it is empty."""
        watch = self._watches.get(replica)
        if watch is None:
            watch = self._watches[replica] = ReplicaWatch(self._lost_after)
        return watch
