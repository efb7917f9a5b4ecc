"""How the body of a request leaves Serve's proxy."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from service.routes import proxy_middlewares as gathered_bodies
from service.routes.proxy_middlewares import GATHERED_BYTES, GatheredBodies

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
            await asyncio.sleep(4 * gathered_bodies.GATHERED_WITHIN_S)
        return coming.pop(0)

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        left.extend([await receive() for _ in range(count)])

    async def send(_message: Message) -> None:
        raise AssertionError

    asyncio.run(GatheredBodies(app)({"type": "http"}, receive, send))
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
    monkeypatch.setattr(gathered_bodies, "GATHERED_WITHIN_S", 0.02)
    messages = [request(b"a", more_body=True), request(b"b", more_body=True), request(b"c", more_body=False)]
    assert heard(messages, 2, pause_before=2) == [request(b"ab", more_body=True), request(b"c", more_body=False)]


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_a_client_that_goes_away_is_heard_at_once(sent: int) -> None:
    assert heard([*[request(b"a", more_body=True)] * sent, DISCONNECT], 1) == [DISCONNECT]
    assert heard([request(b"a", more_body=False), DISCONNECT], 2)[1] == DISCONNECT
