"""Calls of SGLang's API that are aborted by their request ids: they end with the tokens that they have.

`AbortedCalls` decides without I/O. Guarantee: a call that its ingress received before an abort of it is aborted, also
if it reaches the replica later, because it has waited for its turn or is made again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from deployments.protocols.model_server import CallsToAbort

MOST_REMEMBERED = 1000
INTERRUPT_EVERY_S = 0.05
WITHIN_S = 10.0
"""An engine that hangs ends nothing: its replica is replaced."""


@dataclass(frozen=True, slots=True)
class AbortableCall:
    """A prompt of a call, and all that is generated for it."""

    key: str | None
    """The name of its caller's key."""
    rid: str
    received_at: float
    """When the ingress received it, in seconds since 1970."""
    generation_id: str


class AbortedCalls:
    """Aborts so far, the last `MOST_REMEMBERED` of them."""

    def __init__(self) -> None:
        self._until: dict[tuple[str | None, str], float] = {}
        """By key and beginning of request ids, the one that was given last at the end."""

    def note(self, calls: CallsToAbort) -> None:
        name = calls.key, calls.rid
        self._until[name] = max(calls.until, self._until.pop(name, calls.until))
        if len(self._until) > MOST_REMEMBERED:
            del self._until[next(iter(self._until))]

    def has(self, call: AbortableCall) -> bool:
        return any(
            key == call.key and call.rid.startswith(rid) and call.received_at < until
            for (key, rid), until in self._until.items()
        )


class CallAborts:
    """The calls of SGLang's API in one replica."""

    def __init__(self, interrupt: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        """`interrupt` lets generations of these ids end with the tokens that they have."""
        self._interrupt = interrupt
        self._aborted = AbortedCalls()
        self._running: set[AbortableCall] = set()

    def is_aborted(self, call: AbortableCall) -> bool:
        return self._aborted.has(call)

    @contextmanager
    def running(self, call: AbortableCall) -> Iterator[None]:
        """The call generates for the length of the block."""
        self._running.add(call)
        try:
            yield
        finally:
            self._running.discard(call)

    async def abort(self, calls: CallsToAbort) -> None:
        """Returns when all of them have ended, after `WITHIN_S` seconds at the latest."""
        self._aborted.note(calls)
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHIN_S):
                # Again and again, because a call reaches the engine some time after it has begun here.
                while ids := [call.generation_id for call in self._running if self.is_aborted(call)]:
                    await self._interrupt(ids)
                    await asyncio.sleep(INTERRUPT_EVERY_S)
