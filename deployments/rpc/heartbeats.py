"""Heartbeats of a replica's streams, so that a caller can tell a slow replica from a hung one.

The caller's half is `service/remote/silence.py`.
"""

import asyncio
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import NamedTuple

HEARTBEAT_S = 1.0


class Listener(NamedTuple):
    """Who hears the items of a stream: one watch of one caller."""

    caller: str
    named: str = ""
    """The replica that the call named, which has a watch of its own in the caller. The call may have come to another
    one; it is empty if the caller knew of none."""


class Heartbeats:
    """Wakes one stream of each listener that was sent no results for `HEARTBEAT_S` seconds.

    One stream for each listener, not every stream: a busy caller has thousands open, and one item on any of them proves
    that the replica's event loop turns. Only the streams that are open cost anything.
    """

    def __init__(self) -> None:
        self._streams: dict[Listener, dict[asyncio.Event, None]] = {}
        """The open streams of each listener, in the order in which they were opened."""
        self._sent_to: set[Listener] = set()
        """Listeners that were sent results since the last heartbeats."""
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

    def note_results(self, listener: Listener) -> None:
        """The listener was sent results: the next heartbeat can be left out."""
        self._sent_to.add(listener)

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._wake_streams)

    def _wake_streams(self) -> None:
        self._timer = None
        if self._streams:
            self._start_timer()
        for listener, streams in self._streams.items():
            if listener not in self._sent_to:
                next(iter(streams)).set()
        self._sent_to.clear()
