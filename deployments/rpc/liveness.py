"""Liveness of the two ends of a stream: heartbeats for the caller, and a watch of the caller for the replica.

Heartbeats let a caller tell a slow replica from a hung one; the caller's half is `service/remote/replica_stream.py`.

`CallerWatch` tells a replica that an ingress replica has died while it had work done here: Serve's calls reach a
replica as tasks of Ray's, which go on after the end of the process that has made them. Guarantee: what a caller that is
dead has under way is given up every `POLL_S` seconds until it has ended. Whether one lives is asked only of callers
with work here.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

from deployments.upstream.ray_serve.own_replica import has_died, is_name_of_replica

HEARTBEAT_S = 1.0
POLL_S = 0.25


class Listener(NamedTuple):
    """Who hears the items of a stream: one watch of one caller."""

    caller: str
    named: str = ""
    """The replica that the call named, which has a watch of its own in the caller. The call may have come to another
    one; it is empty if the caller knew of none."""


class Heartbeats:
    """Wakes one stream of each listener every `HEARTBEAT_S` seconds, whether results were sent to it or not.

    One stream for each listener, not every stream: a busy caller has thousands open, and one item on any of them proves
    that the replica's event loop turns. Only the streams that are open cost anything.
    """

    def __init__(self) -> None:
        self._streams: dict[Listener, dict[asyncio.Event, None]] = {}
        """The open streams of each listener, in the order in which they were opened."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def callers(self) -> Set[str]:
        """Those that have open streams."""
        return {listener.caller for listener in self._streams}

    @contextmanager
    def open_stream(self, listener: Listener, wake: asyncio.Event) -> Iterator[None]:
        """For the length of the block, the stream can be woken by setting `wake`."""
        self._streams.setdefault(listener, {})[wake] = None
        if self._timer is None:
            self._start_timer()
        try:
            yield
        finally:
            streams = self._streams[listener]
            del streams[wake]
            if not streams:
                del self._streams[listener]

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._wake_streams)

    def _wake_streams(self) -> None:
        self._timer = None
        if self._streams:
            self._start_timer()
        for streams in self._streams.values():
            next(iter(streams)).set()


class CallerWatch:
    def __init__(self, give_up: Callable[[Sequence[str]], None]) -> None:
        """`give_up` ends work of these ids, which nobody waits for. It may be called again for the same work."""
        self._give_up = give_up
        self._work: dict[str, dict[object, Sequence[str]]] = {}
        """The ids of what is under way, by caller and by call."""
        self._watching: asyncio.Task[None] | None = None

    @contextmanager
    def working(self, caller: str, ids: Sequence[str]) -> Iterator[None]:
        """For the length of the block this is under way for the caller, which is watched if it is a replica."""
        if not is_name_of_replica(caller):
            yield
            return
        call = object()
        self._work.setdefault(caller, {})[call] = ids
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            del self._work[caller][call]
            if not self._work[caller]:
                del self._work[caller]

    async def _watch(self) -> None:
        while self._work:
            await asyncio.sleep(POLL_S)
            for caller in list(self._work):
                if await asyncio.to_thread(has_died, caller):
                    self._give_up(list(chain.from_iterable(self._work.get(caller, {}).values())))
        self._watching = None
