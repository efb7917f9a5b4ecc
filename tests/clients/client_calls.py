"""Calls of the asynchronous client in one line, and servers that break."""

import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from rollout_client import AsyncRolloutClient, RolloutResponse, SampleInput, SampleResult
from rollout_client.calls.arrow_bodies import ArrowResponse
from service.startup.config import free_port
from tests.clients.scripted_service import SUMMARY, Json, result
from tests.virtual_time import runs

Result = TypeVar("Result")


@runs
async def call(url: str, method: Callable[[AsyncRolloutClient], Awaitable[Result]], **client: Any) -> Result:
    async with AsyncRolloutClient(url, **client) as rollout_client:
        return await method(rollout_client)


def play(url: str, *samples: SampleInput | Json, client: Json | None = None, **options: Any) -> RolloutResponse:
    return call(url, lambda rollout_client: rollout_client.rollout(samples, **options), **(client or {}))


def play_arrow(url: str, *samples: SampleInput | Json, client: Json | None = None, **options: Any) -> ArrowResponse:
    return call(url, lambda rollout_client: rollout_client.rollout_arrow(samples, **options), **(client or {}))


def stream(url: str, *samples: Json, client: Json | None = None, **options: Any) -> list[tuple[int, SampleResult]]:
    async def read(rollout_client: AsyncRolloutClient) -> list[tuple[int, SampleResult]]:
        async with rollout_client.stream(samples, **options) as rollouts:
            return [positioned async for positioned in rollouts.with_positions()]

    return call(url, read, **(client or {}))


def recording(answers: Iterable[httpx.Response] = (), **options: Any) -> tuple[httpx.AsyncClient, list[httpx.Request]]:
    """An `http_client` that gives `answers`, then a rollout to each request, and the requests that it was given."""
    requests: list[httpx.Request] = []
    scripted = iter(answers)

    def respond(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return next(scripted, None) or httpx.Response(200, json={**SUMMARY, "samples": [result()]})

    return httpx.AsyncClient(transport=httpx.MockTransport(respond), **options), requests


@contextmanager
def breaking_server(responses: list[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """Gives each connection the next of `responses`, then closes it; yields its URL and what it was sent."""
    received: list[bytes] = []

    def serve() -> None:
        for response in responses:
            connection, _ = listening.accept()
            with connection:
                received.append(connection.recv(65536))
                connection.sendall(response)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", received
        thread.join(timeout=60)


def json_response(document: Json) -> bytes:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    return head.encode() + b"\r\n" + body


def free_url() -> str:
    return f"http://127.0.0.1:{free_port()}"
