"""The responses to calls of a model server's API: whole, or a stream of events that never falls silent.

Guarantees: a stream has a heartbeat after `PERIOD_S` seconds without an event, also while its call waits for its turn,
for its prompt to be computed, or for weights; one that fails ends with an error event of its API, in the form that the
API's official clients read, as vLLM's own servers end it; only a call that asks for a stream gets one.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi.responses import Response, StreamingResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from deployments.protocols.model_server import GENERATED, Endpoint
from service.http.middlewares import log_unexpected_error
from service.http.streaming import PERIOD_S, SSE, SSE_HEARTBEAT, HeartbeatStream
from service.model_server.calls import ModelAnswer, refusal_in
from service.problems import problem_of
from service.tracing.spans import note_error

_LAST_EVENTS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete")
"""The beginnings of the events that end the streams of all APIs."""


def _is_closed_by(part: bytes) -> bool:
    """Whether a part of a stream has its last event. No line begins within data: JSON has no line ends."""
    return any(b"\n" + last in b"\n" + part for last in _LAST_EVENTS)


def _error_event(endpoint: Endpoint, type_: str, message: str, status: int) -> bytes:
    error = {"type": type_, "message": message, "code": status}
    if endpoint not in ("messages", "responses"):
        return b"data: %s\n\ndata: [DONE]\n\n" % to_json({"error": error})
    event: dict[str, Any] = {"type": "error", "error": error}
    if endpoint == "responses":
        event |= {"code": str(status), "message": message, "param": None, "sequence_number": 0}
    return b"event: error\ndata: %s\n\n" % to_json(event)


_Answering = asyncio.Task[ModelAnswer]
logger = logging.getLogger("rollout_service.routes")


async def response_to(
    endpoint: Endpoint, answer: Coroutine[Any, Any, ModelAnswer], request_id: str, asks_for_stream: bool = False
) -> Response:
    """The response to a call. Returns when the answer has begun; for a stream that waits, after `PERIOD_S` seconds.

    Args:
        answer: returns when the answer has begun.
        asks_for_stream: whether the call does.

    Raises what `answer` raises, unless the response has begun without it: then the error is the last event.
    """
    answering = asyncio.create_task(answer)
    try:
        if asks_for_stream and endpoint in GENERATED:
            await asyncio.wait({answering}, timeout=PERIOD_S)
            if not answering.done():
                # A proxy in front sees an answer: from now on its status is said.
                return _EventStream(answering, endpoint, _late_events(endpoint, answering), request_id)
        begun = await answering
        if not begun.media_type.startswith(SSE):
            return Response(await begun.whole(), begun.status, media_type=begun.media_type)
        return _EventStream(answering, endpoint, begun.body, request_id)
    except asyncio.CancelledError:
        await _leave(answering)
        raise


async def _leave(answering: _Answering) -> None:
    """Aborts the call, however far it is. One that has ended stays so."""
    answering.cancel()
    await asyncio.wait({answering})
    if not answering.cancelled() and answering.exception() is None:
        await answering.result().aclose()


async def _late_events(endpoint: Endpoint, answering: _Answering) -> AsyncGenerator[bytes, None]:
    """A heartbeat, and the events of the answer once it is there."""
    yield SSE_HEARTBEAT
    answer = await answering
    if not answer.media_type.startswith(SSE):
        yield _error_event(endpoint, *refusal_in(await answer.whole()), answer.status)
        return
    async for part in answer.body:
        yield part


async def _ending_with_its_error(
    endpoint: Endpoint, events: AsyncGenerator[bytes, None], request_id: str
) -> AsyncGenerator[bytes, None]:
    """The events; if one fails, the last is the error, because the status was sent before."""
    part = b""
    try:
        async with aclosing(events):
            async for part in events:
                yield part
    except Exception as error:
        note_error(error)
        problem = problem_of(error).problem
        if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            log_unexpected_error(error, request_id)
        elif problem.status > HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.warning("A stream ends with an error.", exc_info=error, extra={"request_id": request_id})
        if not _is_closed_by(part):
            yield _error_event(endpoint, problem.type, problem.detail or problem.title, problem.status)


class _EventStream(StreamingResponse):
    """Aborts its call when nobody reads it any longer, also if nobody has begun to."""

    def __init__(
        self, answering: _Answering, endpoint: Endpoint, events: AsyncGenerator[bytes, None], request_id: str
    ) -> None:
        """Each part of `events` ends with an event."""
        self._answering = answering
        self._stream = HeartbeatStream(_ending_with_its_error(endpoint, events, request_id), PERIOD_S, SSE_HEARTBEAT)
        super().__init__(self._stream, media_type=f"{SSE}; charset=utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.aclose()
            await _leave(self._answering)
