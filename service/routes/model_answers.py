"""The responses to calls of a model server's API: whole, or a stream of events that never falls silent.

Guarantees: a stream has a heartbeat after `PERIOD_S` seconds without an event, also while its call waits for its turn,
for its prompt to be computed, or for weights; only a call that asks for a stream gets one.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from deployments.serving_records import GENERATED, Endpoint
from service.model_calls import ModelAnswer
from service.requests.streams import asks_for_stream
from service.responses.error_events import problem_event, refusal_event
from service.responses.heartbeats import PERIOD_S, SSE, SSE_HEARTBEAT, HeartbeatStream
from service.responses.problems import problem_of

ONE_PART = "application/json"
Answering = asyncio.Task[ModelAnswer]
logger = logging.getLogger("rollout_service.routes")


async def response_to(
    endpoint: Endpoint, body: bytes, answer: Coroutine[Any, Any, ModelAnswer], request_id: str
) -> Response:
    """The response to a call. Returns when the answer has begun; for a stream that waits, after `PERIOD_S` seconds.

    Args:
        body: of the call.
        answer: returns when the answer has begun.

    Raises what `answer` raises, unless the response has begun without it: then the error is the last event.
    """
    answering = asyncio.create_task(answer)
    try:
        if endpoint in GENERATED:
            await asyncio.wait({answering}, timeout=PERIOD_S)
            if not answering.done() and await asks_for_stream(body):
                # A proxy in front sees an answer: from now on its status is said.
                return EventStream(answering, late_events(endpoint, answering, request_id))
        return await response_of(answering)
    except asyncio.CancelledError:
        await leave(answering)
        raise


async def response_of(answering: Answering) -> Response:
    """A whole response for JSON, a stream for events."""
    answer = await answering
    if answer.media_type == ONE_PART:
        return Response(await whole(answer), answer.status, media_type=answer.media_type)
    return EventStream(answering, answer.body, answer.status, answer.media_type)


async def whole(answer: ModelAnswer) -> bytes:
    async with aclosing(answer):
        return b"".join([part async for part in answer.body])


async def leave(answering: Answering) -> None:
    """Aborts the call, however far it is. One that has ended stays so."""
    answering.cancel()
    await asyncio.wait({answering})
    if not answering.cancelled() and answering.exception() is None:
        await answering.result().aclose()


async def late_events(endpoint: Endpoint, answering: Answering, request_id: str) -> AsyncGenerator[bytes, None]:
    """A heartbeat, and the events of the answer once it is there; or the error that took its place."""
    yield SSE_HEARTBEAT
    try:
        answer = await answering
    except Exception as error:
        problem = problem_of(error).problem
        if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.warning("A stream ends with an error.", exc_info=error, extra={"request_id": request_id})
        yield problem_event(endpoint, problem.model_copy(update={"request_id": request_id}))
        return
    if answer.media_type == ONE_PART:
        yield refusal_event(endpoint, answer.status, await whole(answer))
        return
    async for part in answer.body:
        yield part


class EventStream(StreamingResponse):
    """Aborts its call when nobody reads it any longer, also if nobody has begun to."""

    def __init__(
        self,
        answering: Answering,
        events: AsyncGenerator[bytes, None],
        status: int = HTTPStatus.OK,
        media_type: str = f"{SSE}; charset=utf-8",
    ) -> None:
        """Args: `events` come in parts, each of which ends with an event."""
        self._answering = answering
        self._stream = HeartbeatStream(events, PERIOD_S, SSE_HEARTBEAT)
        super().__init__(self._stream, status, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.aclose()
            await leave(self._answering)
