"""Calls of SGLang's API that are aborted by their request ids: they end with the tokens that they have.

Guarantee: a call that was received before an abort of it is aborted, also if it reaches the replica later, because it
has waited for its turn or is made again; one that was received later is not. Of two ingress replicas on machines of
their own this holds as far as the clocks of the machines agree.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from deployments.protocols.model_server import CallsToAbort, ServedRequest

MOST_REMEMBERED = 1000
_INTERRUPT_EVERY_S = 0.05
_WITHIN_S = 10.0
"""An engine that hangs ends nothing: its replica is replaced."""


@dataclass(frozen=True, slots=True, eq=False)
class AbortableCall:
    """A prompt of a call, and all that is generated for it."""

    request: ServedRequest
    """The call. Its caller's key and the time are those of the prompt too."""
    rid: str
    generation_id: str


class CallAborts:
    """The calls of SGLang's API in one replica, and the last `MOST_REMEMBERED` aborts of any."""

    def __init__(self, interrupt: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        """`interrupt` lets generations of these ids end with the tokens that they have."""
        self._interrupt = interrupt
        self._until: dict[tuple[str | None, str], float] = {}
        """When calls were aborted, by key and beginning of request ids, the one that was given last at the end."""
        self._running: set[AbortableCall] = set()

    def note(self, calls: CallsToAbort) -> None:
        name = calls.key, calls.rid
        self._until[name] = max(calls.until, self._until.pop(name, 0.0))
        if len(self._until) > MOST_REMEMBERED:
            del self._until[next(iter(self._until))]

    def is_aborted(self, call: AbortableCall) -> bool:
        return any(
            key == call.request.share.key and call.rid.startswith(rid) and call.request.received_at < until
            for (key, rid), until in self._until.items()
        )

    @contextmanager
    def running(self, call: AbortableCall) -> Iterator[None]:
        """The call generates for the length of the block."""
        self._running.add(call)
        try:
            yield
        finally:
            self._running.discard(call)

    async def abort(self, calls: CallsToAbort) -> None:
        """Returns when all of them have ended, after `_WITHIN_S` seconds at the latest."""
        self.note(calls)
        with suppress(TimeoutError):
            async with asyncio.timeout(_WITHIN_S):
                # Again and again, because a call reaches the engine some time after it has begun here.
                while ids := [call.generation_id for call in self._running if self.is_aborted(call)]:
                    await self._interrupt(ids)
                    await asyncio.sleep(_INTERRUPT_EVERY_S)
