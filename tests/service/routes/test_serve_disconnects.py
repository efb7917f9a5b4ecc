"""What the application hears of a client that went away, behind Serve's proxy."""

import asyncio
from collections.abc import Callable

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, TaskCancelledError, WorkerCrashedError
from starlette.types import Message, Receive, Scope, Send

from service.routes.serve_disconnects import ENDS_PER_ITERATION, ServeDisconnects


def received(answer: Callable[[], Message]) -> list[Message]:
    """What an application receives whose server receives `answer()`."""
    heard: list[Message] = []

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        heard.append(await receive())

    async def receive() -> Message:
        return answer()

    async def send(_message: Message) -> None:
        raise AssertionError

    asyncio.run(ServeDisconnects(app)({"type": "http"}, receive, send))
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
        asyncio.run(ServeDisconnects(app)({"type": "http"}, nothing_comes, no_answer))


def test_requests_that_are_cancelled_at_once_end_in_turn_and_all_before_their_cancellation_does() -> None:
    ended_in: list[int] = []
    iteration = 0

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended_in.append(iteration)

    async def scenario() -> None:
        nonlocal iteration
        disconnects = ServeDisconnects(app)
        requests = [asyncio.create_task(disconnects({"type": "http"}, nothing_comes, no_answer)) for _ in range(100)]
        await asyncio.sleep(0.01)
        for request in requests:
            request.cancel()
        while not all(request.done() for request in requests):
            iteration += 1
            assert len(ended_in) >= sum(request.done() for request in requests)
            await asyncio.sleep(0)
        assert all(request.cancelled() for request in requests)

    asyncio.run(scenario())
    assert len(ended_in) == 100
    assert max(map(ended_in.count, ended_in)) <= ENDS_PER_ITERATION


def test_a_request_that_is_cancelled_again_while_it_waits_for_its_turn_ends_too() -> None:
    ended = 0

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            ended += 1

    async def scenario() -> None:
        disconnects = ServeDisconnects(app)
        requests = [asyncio.create_task(disconnects({"type": "http"}, nothing_comes, no_answer)) for _ in range(40)]
        await asyncio.sleep(0.01)
        for request in requests:
            request.cancel()
        await asyncio.sleep(0)
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)

    asyncio.run(scenario())
    assert ended == 40


def test_clients_that_a_dead_proxy_takes_along_leave_in_turn() -> None:
    heard_in: list[int] = []
    iteration = 0
    dead = asyncio.Event()

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        assert (await receive())["type"] == "http.disconnect"
        heard_in.append(iteration)

    async def receive() -> Message:
        await dead.wait()
        raise ActorDiedError

    async def scenario() -> None:
        nonlocal iteration
        disconnects = ServeDisconnects(app)
        requests = [asyncio.create_task(disconnects({"type": "http"}, receive, no_answer)) for _ in range(100)]
        await asyncio.sleep(0.01)
        dead.set()
        while not all(request.done() for request in requests):
            iteration += 1
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert len(heard_in) == 100
    assert max(map(heard_in.count, heard_in)) <= ENDS_PER_ITERATION
