"""Runs calls of vLLM's servers, each in a task of its own, and passes their answers on in parts."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from deployments.failures import RolloutFailure
from deployments.generation.serving.served_call import CURRENT_CALL, ServedCall
from deployments.protocols.model_server import ServedPart
from deployments.rpc.background_tasks import BackgroundTasks

_GATHER_S = 0.02
"""Events of so long go in one part, because each part costs both ends half a millisecond."""
running_calls = BackgroundTasks()
logger = logging.getLogger("rollout_service.generation")


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """An answer of one of vLLM's servers: its whole body, or the events of a stream."""

    status: int
    media_type: str
    body: bytes | AsyncGenerator[str, None]


class _RunningCall:
    def __init__(self, answer: Callable[[ServedCall], Awaitable[ServedAnswer]], call: ServedCall) -> None:
        self._call = call
        self._bytes = bytearray()
        self._some = asyncio.Event()
        self._failure: Exception | None = None
        self.begun: ServedAnswer | None = None
        """Once the answer has begun."""
        self.ended = asyncio.Event()
        self._task = running_calls.start(self._run(answer))

    def leave(self) -> None:
        """The caller does not wait any longer."""
        self._task.cancel()

    async def next(self) -> bytes:
        """The bytes that have come since the last time; empty at the end alone.

        Raises:
            RolloutFailure: another replica can make the call; or the answer broke off.
            Exception: what was raised before the answer began.
        """
        await self._some.wait()
        if (failure := self._call.retryable_failure or self._failure) is not None:
            raise failure
        taken = bytes(self._bytes)
        self._bytes.clear()
        if not self.ended.is_set():
            self._some.clear()
        return taken

    async def _run(self, answer: Callable[[ServedCall], Awaitable[ServedAnswer]]) -> None:
        CURRENT_CALL.set(self._call)
        try:
            self.begun = await answer(self._call)
            if isinstance(self.begun.body, bytes):
                self._bytes += self.begun.body
            else:
                await self._take(self.begun.body)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            self._note_failure(error)
        finally:
            if self._call.session is not None:
                self._call.session.leave()
            self.ended.set()
            self._some.set()

    async def _take(self, events: AsyncGenerator[str, None]) -> None:
        async with aclosing(events):
            async for event in events:
                self._bytes += event.encode()
                self._some.set()

    def _note_failure(self, error: Exception) -> None:
        if self.begun is None:
            self._failure = error
            return
        about = {"request_id": self._call.request.request_id, "generation_id": self._call.request.generation_id}
        logger.warning("A call broke while it was answered.", exc_info=error, extra=about)
        # An end like any other would hide from the caller that something is missing.
        self._failure = RolloutFailure("The answer broke off.")


async def answer_parts(
    answer: Callable[[ServedCall], Awaitable[ServedAnswer]], call: ServedCall
) -> AsyncGenerator[ServedPart, None]:
    """The answer of the call, as it is made. Closing the generator breaks the call off.

    Args:
        answer: returns when the answer has begun. `CURRENT_CALL` is the call, until the end of its stream.

    Raises:
        RolloutFailure: another replica can make the call; or the answer broke off.
        Exception: what `answer` raises.
    """
    running = _RunningCall(answer, call)
    try:
        while True:
            body = await running.next()
            has_ended = running.ended.is_set()
            # The status waits for the first bytes: until then another replica can make the call.
            begun = running.begun if not call.has_begun and (body or has_ended) else None
            call.has_begun |= begun is not None
            yield ServedPart(
                body,
                None if begun is None else begun.status,
                "" if begun is None else begun.media_type,
                tokens=call.tokens if has_ended else None,
            )
            if has_ended:
                return
            await _wait_for_event(running.ended, _GATHER_S)
    finally:
        running.leave()


async def _wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event is set, after so many seconds at the latest."""
    if event.is_set():
        return
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
