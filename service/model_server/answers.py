"""The responses to calls of a model server's API: whole, or a stream of events that never falls silent.

Guarantees: a stream has a heartbeat after `PERIOD_S` seconds without an event, also while its call waits for its turn,
for its prompt to be computed, or for weights; one that fails ends with an error event of its API, in the form that the
API's official clients read, as vLLM's own servers end it; only a call that asks for a stream gets one.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi.responses import Response, StreamingResponse
from pydantic_core import from_json, to_json
from starlette.types import Receive, Scope, Send

from deployments.protocols.model_server import GENERATED, Endpoint
from rollout_client.contract.problems import Problem
from service.http.middlewares import log_unexpected_error
from service.http.streaming import PERIOD_S, SSE, SSE_HEARTBEAT, HeartbeatStream
from service.model_server.calls import ModelAnswer
from service.problems import problem_of
from service.tracing.spans import note_error

_LAST_EVENTS: Mapping[Endpoint, tuple[bytes, ...]] = {
    "chat/completions": (b"data: [DONE]",),
    "completions": (b"data: [DONE]",),
    "messages": (b"event: message_stop",),
    "responses": (b"event: response.completed", b"event: response.incomplete"),
    "generate": (b"data: [DONE]",),
    "inference/v1/generate": (b"data: [DONE]",),
}
SEQUENCE_NUMBER = re.compile(rb'"sequence_number":\s?(\d+)')


def _is_closed_by(endpoint: Endpoint, part: bytes) -> bool:
    """Whether a part of a stream has its last event. No line begins within data: JSON has no line ends."""
    return any(b"\n" + last in b"\n" + part for last in _LAST_EVENTS[endpoint])


def _problem_event(endpoint: Endpoint, problem: Problem, after: bytes) -> bytes:
    """The problem as an event; `after` is the part of the stream before it, empty at the beginning."""
    numbers = SEQUENCE_NUMBER.findall(after)
    number = int(numbers[-1]) + 1 if numbers else 0
    return _error_event(endpoint, problem.detail or problem.title, problem.type, problem.status, number)


def _refusal_event(endpoint: Endpoint, status: int, body: bytes) -> bytes:
    """The refusal of vLLM's server as an event."""
    try:
        fields = from_json(body)
        error: dict[str, Any] = fields["error"]
        return _error_event(endpoint, str(error["message"]), str(error["type"]), status)
    except (ValueError, KeyError, TypeError):
        return _error_event(endpoint, body.decode(errors="replace"), "error", status)


def _error_event(endpoint: Endpoint, message: str, type_: str, status: int, number: int = 0) -> bytes:
    """`number` is the event's in a stream of the Responses API."""
    error = {"type": type_, "message": message, "code": status}
    if endpoint == "messages":
        return b"event: error\ndata: %s\n\n" % to_json({"type": "error", "error": error})
    if endpoint == "responses":
        fields = {"type": "error", "code": str(status), "message": message, "param": None, "sequence_number": number}
        return b"event: error\ndata: %s\n\n" % to_json({**fields, "error": error})
    return b"data: %s\n\ndata: [DONE]\n\n" % to_json({"error": error})


Answering = asyncio.Task[ModelAnswer]
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
            return Response(await _whole(begun), begun.status, media_type=begun.media_type)
        return _EventStream(answering, endpoint, begun.body, request_id)
    except asyncio.CancelledError:
        await _leave(answering)
        raise


async def _whole(answer: ModelAnswer) -> bytes:
    async with aclosing(answer):
        return b"".join([part async for part in answer.body])


async def _leave(answering: Answering) -> None:
    """Aborts the call, however far it is. One that has ended stays so."""
    answering.cancel()
    await asyncio.wait({answering})
    if not answering.cancelled() and answering.exception() is None:
        await answering.result().aclose()


async def _late_events(endpoint: Endpoint, answering: Answering) -> AsyncGenerator[bytes, None]:
    """A heartbeat, and the events of the answer once it is there."""
    yield SSE_HEARTBEAT
    answer = await answering
    if not answer.media_type.startswith(SSE):
        yield _refusal_event(endpoint, answer.status, await _whole(answer))
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
        if not _is_closed_by(endpoint, part):
            yield _problem_event(endpoint, problem, part)


class _EventStream(StreamingResponse):
    """Aborts its call when nobody reads it any longer, also if nobody has begun to."""

    def __init__(
        self,
        answering: Answering,
        endpoint: Endpoint,
        events: AsyncGenerator[bytes, None],
        request_id: str,
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
