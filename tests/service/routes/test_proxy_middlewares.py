"""What Serve's proxy does with a request before Serve reads its headers."""

import asyncio
import json
from typing import Any

import pytest
from dotenv import dotenv_values
from ray.serve._private.http_util import _apply_middlewares, validate_http_proxy_callback_return
from ray.serve._private.utils import call_function_from_import_path
from starlette.types import Message, Receive, Scope, Send

from tests.paths import REPOSITORY

IMPORT_PATH = str(dotenv_values(REPOSITORY / "serve.env")["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"])
Headers = list[tuple[bytes, bytes]]


def answered(headers: Headers) -> tuple[list[Headers], list[Message]]:
    """The headers that Serve sees, and what the caller gets, with the middlewares in the order of Serve."""
    seen: list[Headers] = []
    sent: list[Message] = []

    async def serve(scope: Scope, _receive: Receive, send: Send) -> None:
        seen.append(list(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(message)

    middlewares: Any = validate_http_proxy_callback_return(call_function_from_import_path(IMPORT_PATH))
    app: Any = _apply_middlewares(serve, middlewares)
    asyncio.run(app({"type": "http", "headers": headers}, receive, send))
    return seen, sent


@pytest.mark.parametrize(
    "name",
    [
        b"x-request-disconnect-disabled",
        b"X-Request-Timeout-Seconds",
        b"x_request_timeout_seconds",
        b"serve_multiplexed_model_id",
        b"Serve-Multiplexed-Model-Id",
        b"x-session-id",
        b"X_Session_Id",
    ],
)
@pytest.mark.parametrize("value", [b"?1", b"\xe9"])
def test_serve_sees_none_of_its_own_headers(name: bytes, value: bytes) -> None:
    [[first, *others]], sent = answered([(b"accept", b"a"), (name, value), (b"x-request-id", b"mine")])
    assert (first, others) == ((b"accept", b"a"), [(b"x-request-id", b"mine")])
    assert sent[0]["status"] == 200


@pytest.mark.parametrize("given", [b"\xe9", b"", b"a" * 129, b"a\tb"])
def test_an_id_that_is_not_allowed_is_refused_before_serve_reads_it(given: bytes) -> None:
    seen, [start, body] = answered([(b"x-request-id", given)])
    assert seen == []
    problem = json.loads(body["body"])
    assert (start["status"], problem["errors"][0]["field"]) == (422, "header.X-Request-ID")
    ids = [value.decode() for name, value in start["headers"] if name == b"x-request-id"]
    assert ids == [problem["request_id"]]


def test_an_allowed_id_and_none_pass() -> None:
    seen, sent = answered([(b"x-request-id", b"mine")])
    assert (seen, sent[0]["headers"]) == ([[(b"x-request-id", b"mine")]], [(b"x-request-id", b"mine")])
    [[(name, made)]], _ = answered([])
    assert (name, len(made) > 8) == (b"x-request-id", True)
