"""Calls of SGLang's API that are aborted by their request ids: they end with the tokens that they have.

Guarantees: a call that an ingress received before an abort of it is aborted, also
if it reaches the replica later, because it has waited for its turn or is made again; one that was received after the
answer to an abort is not. Where another ingress received the abort, the first holds for calls that were received
earlier by more than they take from there to the replica. No clock is compared with that of another process.
"""

import asyncio
import time
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
    """The call. Its caller's key and the times are those of the prompt too."""
    rid: str
    generation_id: str


class CallAborts:
    """The calls of SGLang's API in one replica, and the last `MOST_REMEMBERED` aborts."""

    def __init__(self, interrupt: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        """`interrupt` lets generations of these ids end with the tokens that they have."""
        self._interrupt = interrupt
        self._until: dict[tuple[str | None, str, str], tuple[float, float]] = {}
        """By key, beginning of request ids and ingress, the one that was given last at the end: the last time of the
        ingress, and when the replica was told, by its own clock."""
        self._running: set[AbortableCall] = set()

    def note(self, calls: CallsToAbort, now: float) -> None:
        """`now` is of the monotonic clock of this process."""
        name = calls.key, calls.rid, calls.ingress
        last, _ = self._until.pop(name, (calls.until, now))
        self._until[name] = max(calls.until, last), now
        if len(self._until) > MOST_REMEMBERED:
            del self._until[next(iter(self._until))]

    def is_aborted(self, call: AbortableCall) -> bool:
        request = call.request
        here = request.arrived_at - request.age_s
        return any(
            key == request.share.key
            and call.rid.startswith(rid)
            and (request.received_at < until if ingress == request.ingress else here < told_at)
            for (key, rid, ingress), (until, told_at) in self._until.items()
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
        self.note(calls, time.monotonic())
        with suppress(TimeoutError):
            async with asyncio.timeout(_WITHIN_S):
                # Again and again, because a call reaches the engine some time after it has begun here.
                while ids := [call.generation_id for call in self._running if self.is_aborted(call)]:
                    await self._interrupt(ids)
                    await asyncio.sleep(_INTERRUPT_EVERY_S)
