"""Endpoints of vLLM's servers, read and written as vLLM's own router does it, and their calls, which run as tasks.

The router needs a FastAPI application, and a task more for each call.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, TypeAdapter, ValidationError
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler
from vllm.exceptions import VLLMError, VLLMValidationError

from deployments.failures import RolloutFailure
from deployments.generation.serving.served_call import CURRENT_CALL, ServedCall
from deployments.protocols.model_server import ServedPart
from deployments.rpc.background_tasks import BackgroundTasks

_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"
_APP = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(log_error_stack=False)))
"""The parts of a server's application that vLLM's handlers of errors look up."""
_GATHER_S = 0.02
"""Events of so long go in one part, because each part costs both ends half a millisecond."""
running_calls = BackgroundTasks()
logger = logging.getLogger("rollout_service.generation")


@dataclass(frozen=True, slots=True)
class _ServedAnswer:
    """An answer of one of vLLM's servers: its whole body, or the events of a stream."""

    status: int
    media_type: str
    body: bytes | AsyncGenerator[str, None]


def _openai_error(answer: ErrorResponse) -> JSONResponse:
    return JSONResponse(answer.model_dump(), answer.error.code)


@dataclass(frozen=True, slots=True)
class VLLMEndpoint:
    answer: Callable[[Any, Request], Awaitable[Any]]
    """Returns an answer of vLLM's types, one that is JSON already, or the events of a stream."""
    body: "TypeAdapter[Any] | None" = None
    """The type of its bodies; `None`: it has none."""
    dumped: Mapping[str, Any] = field(default_factory=dict)
    """Options with which an answer becomes JSON."""
    error: Callable[[ErrorResponse], JSONResponse] = _openai_error
    """Writes the errors of `answer`. Those of a body are OpenAI's everywhere."""

    async def answered(self, call: ServedCall) -> _ServedAnswer:
        """Returns when the answer has begun. What the endpoint raises is an answer too."""
        # vLLM names its answer after the header.
        headers = [(b"x-request-id", call.request.generation_id.encode())]
        raw_request = Request({"type": "http", "headers": headers, "app": _APP})
        write_error: Callable[[ErrorResponse], JSONResponse] = _openai_error
        try:
            request = None if self.body is None else _parsed(self.body, call.request.body)
            write_error = self.error
            return self._written(await self.answer(request, raw_request))
        except RequestValidationError as error:
            return _whole(await validation_exception_handler(raw_request, error))
        except Exception as error:
            answer = create_error_response(error)
            if answer.error.code >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, VLLMError):
                logger.warning("A call broke before it was answered.", exc_info=error, extra=call.request.log_fields)
            return _whole(write_error(answer))

    def _written(self, made: Any) -> _ServedAnswer:
        match made:
            case ErrorResponse():
                return _whole(self.error(made))
            case BaseModel():
                return _whole(JSONResponse(made.model_dump(**self.dumped)))
            case bytes():
                return _ServedAnswer(HTTPStatus.OK, _JSON, made)
        return _ServedAnswer(HTTPStatus.OK, _EVENTS, made)


def _whole(response: JSONResponse) -> _ServedAnswer:
    return _ServedAnswer(response.status_code, _JSON, bytes(response.body))


def _parsed(body: "TypeAdapter[Any]", content: bytes) -> Any:
    """The body of a call. Raises the problems that FastAPI has with it for vLLM's router."""
    try:
        return body.validate_python(json.loads(content), from_attributes=True)
    except ValidationError as error:
        problems = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(problems) from error
    except (ValueError, RecursionError) as error:
        raise VLLMValidationError(f"The body cannot be read as JSON: {error}", parameter="body") from error


class _RunningCall:
    def __init__(self, answer: Callable[[ServedCall], Awaitable[_ServedAnswer]], call: ServedCall) -> None:
        self._call = call
        self._bytes = bytearray()
        self._some = asyncio.Event()
        self._failure: Exception | None = None
        self.begun: _ServedAnswer | None = None
        """Once the answer has begun."""
        self.ended = asyncio.Event()
        self.task = running_calls.start(self._run(answer))

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

    async def _run(self, answer: Callable[[ServedCall], Awaitable[_ServedAnswer]]) -> None:
        CURRENT_CALL.set(self._call)
        try:
            self.begun = await answer(self._call)
            if isinstance(self.begun.body, bytes):
                self._bytes += self.begun.body
                return
            async with aclosing(self.begun.body) as events:
                async for event in events:
                    self._bytes += event.encode()
                    self._some.set()
        except Exception as error:
            self._failure = error
            if self.begun is not None:
                logger.warning(
                    "A call broke while it was answered.", exc_info=error, extra=self._call.request.log_fields
                )
                # An end like any other would hide from the caller that something is missing.
                self._failure = RolloutFailure("The answer broke off.")
        finally:
            self._call.leave()
            self.ended.set()
            self._some.set()


async def answer_parts(
    answer: Callable[[ServedCall], Awaitable[_ServedAnswer]], call: ServedCall
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
            with suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    await running.ended.wait()
    finally:
        # Nothing happens to one that has ended.
        running.task.cancel()
