"""What the application hears of a client that went away, behind Serve's proxy."""

import asyncio
from collections.abc import Callable

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, TaskCancelledError, WorkerCrashedError
from starlette.types import Message, Receive, Scope, Send

from service.routes.serve_disconnects import ServeDisconnects


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
