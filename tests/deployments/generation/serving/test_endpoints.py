"""Bodies, answers and errors of the endpoints are those of vLLM's own router, which a FastAPI application has."""

import asyncio
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter
from vllm.entrypoints.anthropic.api_router import router as messages_router
from vllm.entrypoints.anthropic.api_router import translate_error_response
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineGenerateError

from deployments.generation.serving.endpoints import VLLMEndpoint, answer_parts
from deployments.generation.serving.served_call import ServedCall
from deployments.protocols.generation import SamplingOptions
from deployments.protocols.model_server import ServedRequest
from tests.virtual_time import runs

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
RIGHT = b'{"model": "any", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}'
ROUTES: dict[str, Any] = {
    "chat": ("/v1/chat/completions", ChatCompletionRequest, {}),
    "messages": (
        "/v1/messages",
        AnthropicMessagesRequest,
        {"dumped": {"exclude_none": True}, "error": translate_error_response},
    ),
}
Found = tuple[int, str, bytes]


async def by_router(path: str, body: bytes, answer: Any) -> Found:
    app = FastAPI(openapi_url=None)
    app.state.args = SimpleNamespace(log_error_stack=False, sse_keep_alive_interval=0)
    app.state.server = SimpleNamespace(should_exit=False)
    app.state.engine_client = SimpleNamespace(errored=False, is_running=True)
    app.state.openai_serving_chat = SimpleNamespace(create_chat_completion=answer)
    app.state.anthropic_serving_messages = SimpleNamespace(create_messages=answer)
    init_exception_handler(app)
    app.include_router(chat_router)
    app.include_router(messages_router)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"content-type": "application/json", "x-request-id": "call-1"}
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as http:
        response = await http.post(path, content=body, headers=headers)
    return response.status_code, response.headers["content-type"], response.content


async def by_endpoint(endpoint: VLLMEndpoint, body: bytes) -> Found:
    call = ServedCall(ServedRequest("call-1", range(3), 8, (), SamplingOptions(), body=body))
    parts = [part async for part in answer_parts(endpoint.answered, call)]
    [status] = [part.status for part in parts if part.status is not None]
    [media_type] = [part.media_type for part in parts if part.media_type]
    return status, media_type, b"".join(part.body for part in parts)


@runs
async def assert_equal(route: str, body: bytes, answer: Any) -> Found:
    path, body_type, written = ROUTES[route]
    endpoint = VLLMEndpoint(answer, TypeAdapter(body_type), **written)
    ours, theirs = await by_endpoint(endpoint, body), await by_router(path, body, answer)
    assert ours == theirs
    return ours


async def never(_request: BaseModel, _raw_request: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("body", [b"[]", b'{"model": 1, "messages": [], "max_tokens": "many"}'])
def test_a_body_that_is_no_call_has_the_same_problems(route: str, body: bytes) -> None:
    status, _, _ = assert_equal(route, body, never)
    assert status == 400


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("body", [b"", b"null", b"{", b"\xff\xfe{}", b"\x80", b"[" * 100_000])
def test_a_body_that_cannot_be_read_is_refused(route: str, body: bytes) -> None:
    endpoint = VLLMEndpoint(never, TypeAdapter(ROUTES[route][1]), **ROUTES[route][2])
    status, media_type, content = asyncio.run(by_endpoint(endpoint, body))
    assert (status, media_type) == (400, "application/json")
    assert orjson.loads(content)["error"]["type"].startswith("Bad")


class Odd(Exception):
    """One that no server knows."""


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "error",
    [
        VLLMValidationError("no such field", parameter="n"),
        GracefulHTTPError("too many", HTTPStatus.TOO_MANY_REQUESTS),
        EngineGenerateError("broken"),
        ValueError("bad /tmp/file.py"),
        Odd("odd"),
    ],
    ids=type,
)
def test_what_a_server_raises_is_the_same_answer(route: str, error: Exception) -> None:
    async def fails(_request: BaseModel, _raw_request: Any) -> Any:
        raise error

    assert_equal(route, RIGHT, fails)
