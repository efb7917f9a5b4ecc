"""Calls the application of vLLM's servers inside the process, and hands its answer on in parts."""

import asyncio
import logging
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

from starlette.types import ASGIApp

from deployments.failures import RolloutFailure
from deployments.generation.serving.served_call import CURRENT_CALL, ServedCall
from deployments.protocols.model_server import Endpoint, ServedPart
from deployments.rpc.background_tasks import BackgroundTasks

GATHER_S = 0.02
"""Events of so long go in one part, because each part costs both ends half a millisecond."""
PATHS: dict[Endpoint, tuple[str, str]] = {
    "chat/completions": ("POST", "/v1/chat/completions"),
    "completions": ("POST", "/v1/completions"),
    "responses": ("POST", "/v1/responses"),
    "messages": ("POST", "/v1/messages"),
    "messages/count_tokens": ("POST", "/v1/messages/count_tokens"),
    "models": ("GET", "/v1/models"),
    "tokenize": ("POST", "/tokenize"),
    "detokenize": ("POST", "/detokenize"),
    "generate": ("POST", "/generate"),
    "inference/v1/generate": ("POST", "/inference/v1/generate"),
}
Message = MutableMapping[str, Any]
logger = logging.getLogger("rollout_service.generation")
running_calls = BackgroundTasks()


class AsgiCall:
    """One call of the application, which runs in a task of its own."""

    def __init__(self, app: ASGIApp, call: ServedCall) -> None:
        self._call = call
        self._request = call.request
        self._was_read = False
        self._caller_is_gone = asyncio.Event()
        self._bytes = bytearray()
        self._some = asyncio.Event()
        self._failure: Exception | None = None
        self.status: int | None = None
        """Once the answer has begun."""
        self.media_type = ""
        self.ended = asyncio.Event()
        running_calls.start(self._run(app, call))

    def leave(self) -> None:
        """The caller does not wait any longer."""
        # Cancelling the task would leave alone the ones that vLLM's handlers start: they wait for this.
        self._caller_is_gone.set()

    async def next(self) -> bytes:
        """The bytes that have come since the last time; empty at the end alone.

        Raises:
            RolloutFailure: another replica can make the call; or the answer broke off.
            Exception: what the application raised before its answer began.
        """
        await self._some.wait()
        if (failure := self._call.retryable_failure or self._failure) is not None:
            raise failure
        taken = bytes(self._bytes)
        self._bytes.clear()
        if not self.ended.is_set():
            self._some.clear()
        return taken

    async def _run(self, app: ASGIApp, call: ServedCall) -> None:
        CURRENT_CALL.set(call)
        try:
            await app(self._scope(), self._receive, self._send)
        except Exception as error:
            if self.status is None:
                self._failure = error
            elif not self._caller_is_gone.is_set():
                about = {"request_id": self._request.request_id, "generation_id": self._request.generation_id}
                logger.warning("A call broke while it was answered.", exc_info=error, extra=about)
            if self.status is not None and not self.ended.is_set():
                # An end like any other would hide from the caller that something is missing.
                self._failure = RolloutFailure("The answer broke off.")
        finally:
            if call.session is not None:
                call.session.leave()
            self._end()

    def _scope(self) -> dict[str, Any]:
        method, path = PATHS[self._request.endpoint]
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"content-type", b"application/json"),
                # vLLM names its answer after it.
                (b"x-request-id", self._request.generation_id.encode()),
            ],
            "client": None,
            "server": None,
            "state": {},
        }

    async def _receive(self) -> Message:
        if not self._was_read:
            self._was_read = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._caller_is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.media_type = dict(message["headers"]).get(b"content-type", b"").decode("latin-1")
            return
        self._bytes += message.get("body", b"")
        if not message.get("more_body", False):
            self._end()
        elif self._bytes:
            self._some.set()

    def _end(self) -> None:
        self.ended.set()
        self._some.set()


async def answer_parts(app: ASGIApp, call: ServedCall) -> AsyncGenerator[ServedPart, None]:
    """The answer of the call, as it is made. Closing the generator breaks the call off.

    Raises what `AsgiCall.next` raises.
    """
    running = AsgiCall(app, call)
    try:
        while True:
            body = await running.next()
            has_ended = running.ended.is_set()
            # The status waits for the first bytes: until then another replica can make the call.
            begins = not call.has_begun and bool(body or has_ended)
            call.has_begun |= begins
            status = running.status if begins else None
            yield ServedPart(
                body,
                status,
                "" if status is None else running.media_type,
                tokens=call.tokens if has_ended else None,
            )
            if has_ended:
                return
            await wait_for_event(running.ended, GATHER_S)
    finally:
        running.leave()


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event is set, after so many seconds at the latest."""
    if event.is_set():
        return
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
