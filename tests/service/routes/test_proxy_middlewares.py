"""Serve's proxy: what it refuses before Serve reads the headers, and how a body leaves it."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock

import pytest
from dotenv import dotenv_values
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.http_util import _apply_middlewares, validate_http_proxy_callback_return
from ray.serve._private.utils import call_function_from_import_path
from starlette.types import Message, Receive, Scope, Send

from service.routes import proxy_middlewares
from service.routes.proxy_middlewares import GATHERED_BYTES, _GatheredBodies
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
    assert [value.decode() for name, value in start["headers"] if name == b"x-request-id"] == [problem["request_id"]]


def test_an_allowed_id_and_none_pass() -> None:
    seen, sent = answered([(b"x-request-id", b"mine")])
    assert (seen, sent[0]["headers"]) == ([[(b"x-request-id", b"mine")]], [(b"x-request-id", b"mine")])
    [[(name, made)]], _ = answered([])
    assert (name, len(made) > 8) == (b"x-request-id", True)


DISCONNECT = {"type": "http.disconnect"}
SIZES = st.lists(st.sampled_from([0, 1, 1000, GATHERED_BYTES // 2, GATHERED_BYTES - 1, GATHERED_BYTES]), max_size=8)


def request(body: bytes, more_body: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more_body}


def heard(messages: Sequence[Message], count: int, pause_before: int | None = None) -> list[Message]:
    """The first `count` messages of the application; the one at `pause_before` comes after the time of a part."""
    coming = list(messages)
    left: list[Message] = []

    async def receive() -> Message:
        if pause_before is not None and len(messages) - len(coming) == pause_before:
            await asyncio.sleep(4 * proxy_middlewares.GATHERED_WITHIN_S)
        return coming.pop(0)

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        left.extend([await receive() for _ in range(count)])

    asyncio.run(_GatheredBodies(app)({"type": "http"}, receive, AsyncMock(side_effect=AssertionError)))
    return left


@given(SIZES)
def test_a_body_arrives_as_it_was_sent_in_parts_that_are_full_but_the_last(sizes: list[int]) -> None:
    chunks = [bytes([number]) * size for number, size in enumerate(sizes)]
    messages = [*(request(chunk, more_body=True) for chunk in chunks), request(b"end", more_body=False)]
    parts: list[Message] = []
    while not parts or parts[-1]["more_body"]:
        parts = heard(messages, len(parts) + 1)
    assert b"".join(part["body"] for part in parts) == b"".join(chunks) + b"end"
    assert all(GATHERED_BYTES <= len(part["body"]) < 2 * GATHERED_BYTES for part in parts[:-1])
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]


def test_a_body_that_comes_whole_passes_as_it_is() -> None:
    message = request(b"{}", more_body=False)
    assert heard([message], 1)[0] is message


def test_what_has_arrived_goes_on_when_the_rest_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_middlewares, "GATHERED_WITHIN_S", 0.02)
    messages = [request(b"a", more_body=True), request(b"b", more_body=True), request(b"c", more_body=False)]
    assert heard(messages, 2, pause_before=2) == [request(b"ab", more_body=True), request(b"c", more_body=False)]


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_a_client_that_goes_away_is_heard_at_once(sent: int) -> None:
    assert heard([*[request(b"a", more_body=True)] * sent, DISCONNECT], 1) == [DISCONNECT]
    assert heard([request(b"a", more_body=False), DISCONNECT], 2)[1] == DISCONNECT
