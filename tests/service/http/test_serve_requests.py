"""Requests behind Serve's proxy: each in its turn, and what the application hears of a client that went away."""

import asyncio
from collections import Counter
from collections.abc import Callable
from unittest.mock import AsyncMock

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    OutOfMemoryError,
    TaskCancelledError,
    WorkerCrashedError,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.middlewares import STEPS_PER_ITERATION, ServeRequests, request_pacer
from tests import virtual_time


def received(answer: Callable[[], Message]) -> list[Message]:
    """What an application receives whose server receives `answer()`."""
    heard: list[Message] = []

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        heard.append(await receive())

    async def receive() -> Message:
        return answer()

    asyncio.run(ServeRequests(app, request_pacer())({"type": "http"}, receive, AsyncMock(side_effect=AssertionError)))
    return heard


def test_what_the_client_sends_arrives_as_it_is() -> None:
    message = {"type": "http.request", "body": b"{}", "more_body": False}
    assert received(lambda: message) == [message]


@pytest.mark.parametrize(
    "error",
    [TaskCancelledError(), ActorDiedError(), ActorUnavailableError("lost", b"1" * 16), OutOfMemoryError("95%")],  # type: ignore[no-untyped-call]
)
def test_a_proxy_that_cancels_its_call_or_dies_is_a_disconnect(error: Exception) -> None:
    def gone() -> Message:
        raise error

    assert received(gone) == [{"type": "http.disconnect"}]


def test_other_failures_of_serve_stay_failures() -> None:
    def broken() -> Message:
        raise WorkerCrashedError

    with pytest.raises(WorkerCrashedError):
        received(broken)


async def nothing_comes() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def no_answer(_message: Message) -> None:
    raise AssertionError


def test_a_failure_of_the_application_reaches_the_server() -> None:
    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        asyncio.run(ServeRequests(app, request_pacer())({"type": "http"}, nothing_comes, no_answer))


def hundred_requests(app: ASGIApp, receive: Receive, send: Send = no_answer) -> list[asyncio.Task[None]]:
    serve_requests = ServeRequests(app, request_pacer())
    return [asyncio.create_task(serve_requests({"type": "http"}, receive, send)) for _ in range(100)]


def assert_in_turn(iterations: list[int], count: int = 100) -> None:
    """What happened in these iterations of the event loop happened in turn."""
    assert len(iterations) == count
    assert max(Counter(iterations).values()) <= STEPS_PER_ITERATION


async def test_requests_that_come_at_once_begin_in_turn() -> None:
    begun_in: list[int] = []

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        begun_in.append(virtual_time.iteration())

    await asyncio.wait(hundred_requests(app, nothing_comes))
    assert_in_turn(begun_in)


@pytest.mark.parametrize("is_dead", [False, True], ids=["a message", "the disconnect of a dead proxy"])
async def test_messages_that_come_at_once_reach_the_application_in_turn(is_dead: bool) -> None:
    heard_in: list[int] = []
    sent = asyncio.Event()

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        assert (await receive())["type"] == ("http.disconnect" if is_dead else "http.request")
        heard_in.append(virtual_time.iteration())

    async def receive() -> Message:
        await sent.wait()
        if is_dead:
            raise ActorDiedError
        return {"type": "http.request"}

    requests = hundred_requests(app, receive)
    await asyncio.sleep(0.01)
    sent.set()
    await asyncio.wait(requests)
    assert_in_turn(heard_in)


async def test_messages_that_are_sent_at_once_are_sent_in_turn() -> None:
    sent_in: list[int] = []
    sent: Counter[str] = Counter()
    answered = asyncio.Event()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await answered.wait()
        for part in ("first", "second"):
            await send({"type": part})

    async def send(message: Message) -> None:
        assert message["type"] == "first" or sent["second"] < sent["first"]
        sent[message["type"]] += 1
        sent_in.append(virtual_time.iteration())

    requests = hundred_requests(app, nothing_comes, send)
    await asyncio.sleep(0.01)
    answered.set()
    await asyncio.gather(*requests)
    assert sent == {"first": 100, "second": 100}
    assert_in_turn(sent_in, 200)


async def test_requests_that_are_cancelled_at_once_end_in_turn() -> None:
    ended_in: list[int] = []

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended_in.append(virtual_time.iteration())

    requests = hundred_requests(app, nothing_comes)
    await asyncio.sleep(0.01)
    for request in requests:
        request.cancel()
    while not all(request.done() for request in requests):
        assert len(ended_in) >= sum(request.done() for request in requests)
        await asyncio.sleep(0)
    assert all(request.cancelled() for request in requests)
    assert_in_turn(ended_in)
