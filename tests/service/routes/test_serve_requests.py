"""Requests behind Serve's proxy: each in its turn, and what the application hears of a client that went away."""

import asyncio
from collections.abc import Callable

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, TaskCancelledError, WorkerCrashedError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.routes.serve_requests import STEPS_PER_ITERATION, ServeRequests, request_pacer


def received(answer: Callable[[], Message]) -> list[Message]:
    """What an application receives whose server receives `answer()`."""
    heard: list[Message] = []

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        heard.append(await receive())

    async def receive() -> Message:
        return answer()

    async def send(_message: Message) -> None:
        raise AssertionError

    asyncio.run(ServeRequests(app, request_pacer())({"type": "http"}, receive, send))
    return heard


def test_what_the_client_sends_arrives_as_it_is() -> None:
    message = {"type": "http.request", "body": b"{}", "more_body": False}
    assert received(lambda: message) == [message]


@pytest.mark.parametrize("error", [TaskCancelledError(), ActorDiedError(), ActorUnavailableError("lost", b"1" * 16)])
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


class Iterations:
    """Counts how often something happens in each iteration of the event loop."""

    def __init__(self) -> None:
        self._iteration = 0
        self._noted: list[int] = []

    def note(self) -> None:
        self._noted.append(self._iteration)

    @property
    def count(self) -> int:
        return len(self._noted)

    @property
    def most(self) -> int:
        return max(map(self._noted.count, self._noted))

    async def pass_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self._iteration += 1
            await asyncio.sleep(0)


def hundred_requests(app: ASGIApp, receive: Receive) -> list[asyncio.Task[None]]:
    serve_requests = ServeRequests(app, request_pacer())
    return [asyncio.create_task(serve_requests({"type": "http"}, receive, no_answer)) for _ in range(100)]


def all_done(requests: list[asyncio.Task[None]]) -> bool:
    return all(request.done() for request in requests)


def test_requests_that_come_at_once_begin_in_turn() -> None:
    begun = Iterations()

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        begun.note()

    async def scenario() -> None:
        requests = hundred_requests(app, nothing_comes)
        await begun.pass_until(lambda: all_done(requests))

    asyncio.run(scenario())
    assert begun.count == 100
    assert begun.most <= STEPS_PER_ITERATION


@pytest.mark.parametrize("is_dead", [False, True], ids=["a message", "the disconnect of a dead proxy"])
def test_messages_that_come_at_once_reach_the_application_in_turn(is_dead: bool) -> None:
    heard = Iterations()
    sent = asyncio.Event()

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        assert (await receive())["type"] == ("http.disconnect" if is_dead else "http.request")
        heard.note()

    async def receive() -> Message:
        await sent.wait()
        if is_dead:
            raise ActorDiedError
        return {"type": "http.request"}

    async def scenario() -> None:
        requests = hundred_requests(app, receive)
        await asyncio.sleep(0.01)
        sent.set()
        await heard.pass_until(lambda: all_done(requests))

    asyncio.run(scenario())
    assert heard.count == 100
    assert heard.most <= STEPS_PER_ITERATION


def test_requests_that_are_cancelled_at_once_end_in_turn_and_all_before_their_cancellation_does() -> None:
    ended = Iterations()

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.note()

    async def scenario() -> None:
        requests = hundred_requests(app, nothing_comes)
        await asyncio.sleep(0.01)
        for request in requests:
            request.cancel()

        def is_over() -> bool:
            assert ended.count >= sum(request.done() for request in requests)
            return all_done(requests)

        await ended.pass_until(is_over)
        assert all(request.cancelled() for request in requests)

    asyncio.run(scenario())
    assert ended.count == 100
    assert ended.most <= STEPS_PER_ITERATION


def test_a_request_that_is_cancelled_again_while_it_waits_for_its_turn_ends_too() -> None:
    ended = 0

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            ended += 1

    async def scenario() -> None:
        requests = hundred_requests(app, nothing_comes)
        await asyncio.sleep(0.01)
        for request in requests:
            request.cancel()
        await asyncio.sleep(0)
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)

    asyncio.run(scenario())
    assert ended == 100
