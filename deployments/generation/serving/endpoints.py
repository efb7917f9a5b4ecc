"""One endpoint of vLLM's servers, read and written as vLLM's own router does it.

That router needs a FastAPI application, and a task more for each call.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, TypeAdapter, ValidationError
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler
from vllm.exceptions import VLLMError

from deployments.generation.serving.running_calls import ServedAnswer
from deployments.generation.serving.served_call import ServedCall

_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"
_APP = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(log_error_stack=False)))
"""The parts of a server's application that vLLM's handlers of errors look up."""
logger = logging.getLogger("rollout_service.generation")


def openai_error(answer: ErrorResponse) -> JSONResponse:
    return JSONResponse(answer.model_dump(), answer.error.code)


@dataclass(frozen=True, slots=True)
class VLLMEndpoint:
    answer: Callable[[Any, Request], Awaitable[Any]]
    """Returns an answer of vLLM's types, one that is JSON already, or the events of a stream."""
    body: "TypeAdapter[Any] | None" = None
    """The type of its bodies; `None`: it has none."""
    dumped: Mapping[str, Any] = field(default_factory=dict)
    """Options with which an answer becomes JSON."""
    error: Callable[[ErrorResponse], JSONResponse] = openai_error
    """Writes the errors of `answer`. Those of a body are OpenAI's everywhere."""

    async def answered(self, call: ServedCall) -> ServedAnswer:
        """Returns when the answer has begun. What the endpoint raises is an answer too."""
        # vLLM names its answer after the header.
        headers = [(b"x-request-id", call.request.generation_id.encode())]
        raw_request = Request({"type": "http", "headers": headers, "app": _APP})
        write_error: Callable[[ErrorResponse], JSONResponse] = openai_error
        try:
            request = None if self.body is None else _parsed(self.body, call.request.body)
            write_error = self.error
            return self._written(await self.answer(request, raw_request))
        except RequestValidationError as error:
            return _whole(await validation_exception_handler(raw_request, error))
        except HTTPException as error:
            return _whole(JSONResponse({"detail": error.detail}, error.status_code))
        except Exception as error:
            answer = create_error_response(error)
            if answer.error.code >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, VLLMError):
                about = {"request_id": call.request.request_id, "generation_id": call.request.generation_id}
                logger.warning("A call broke before it was answered.", exc_info=error, extra=about)
            return _whole(write_error(answer))

    def _written(self, made: Any) -> ServedAnswer:
        match made:
            case ErrorResponse():
                return _whole(self.error(made))
            case BaseModel():
                return _whole(JSONResponse(made.model_dump(**self.dumped)))
            case bytes():
                return ServedAnswer(HTTPStatus.OK, _JSON, made)
        return ServedAnswer(HTTPStatus.OK, _EVENTS, made)


def _whole(response: JSONResponse) -> ServedAnswer:
    return ServedAnswer(response.status_code, _JSON, bytes(response.body))


def _parsed(body: "TypeAdapter[Any]", content: bytes) -> Any:
    """The body of a call as FastAPI reads it for vLLM's router. Raises the same problems."""
    try:
        fields = json.loads(content) if content else None
    except json.JSONDecodeError as error:
        problem = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise RequestValidationError([problem | {"ctx": {"error": error.msg}}]) from error
    except Exception as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, "There was an error parsing the body") from error
    if fields is None:
        raise RequestValidationError([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    try:
        return body.validate_python(fields, from_attributes=True)
    except ValidationError as error:
        problems = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(problems) from error
