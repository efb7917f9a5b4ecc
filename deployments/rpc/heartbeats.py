"""Heartbeats of a replica's streams, so that a caller can tell a slow replica from a hung one.

The caller's half is `service/remote/silence.py`.
"""

import asyncio
from collections.abc import Iterator, Set
from contextlib import contextmanager

HEARTBEAT_S = 1.0


class Heartbeats:
    """Wakes one stream of each caller that was sent no results for `HEARTBEAT_S` seconds.

    One stream for each caller, not every stream: a busy caller has thousands open, and one item on any of them proves
    that the replica's event loop turns. Only the streams that are open cost anything.
    """

    def __init__(self) -> None:
        self._streams: dict[str, dict[asyncio.Event, None]] = {}
        """The open streams of each caller, in the order in which they were opened."""
        self._sent_to: set[str] = set()
        """Callers that were sent results since the last heartbeats."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def callers(self) -> Set[str]:
        """Those that have open streams."""
        return self._streams.keys()

    @contextmanager
    def open_stream(self, caller: str, wake: asyncio.Event) -> Iterator[None]:
        """For the length of the block, the stream can be woken by setting `wake`."""
        self._streams.setdefault(caller, {})[wake] = None
        if self._timer is None:
            self._start_timer()
        try:
            yield
        finally:
            streams = self._streams[caller]
            del streams[wake]
            if not streams:
                del self._streams[caller]

    def note_results(self, caller: str) -> None:
        """The caller was sent results: the next heartbeat can be left out."""
        self._sent_to.add(caller)

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._wake_streams)

    def _wake_streams(self) -> None:
        self._timer = None
        if self._streams:
            self._start_timer()
        for caller, streams in self._streams.items():
            if caller not in self._sent_to:
                next(iter(streams)).set()
        self._sent_to.clear()
