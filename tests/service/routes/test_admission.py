"""Admission over HTTP: what is refused and how, and that everything is free again once the response has been sent."""

import asyncio
import json
import socket
import time
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from rollout_client.arrow.schema import ARROW
from service.admission.capacity import Amounts
from service.settings import AdmissionSettings, RequestLimits
from tests.clients.scripted_service import served
from tests.service.scripted_http import MAX_MODEL_LEN, NDJSON, SAMPLE, ScriptedHttp

JSON = "application/json"
FULL_ROLLOUTS = 4
MOST_BODY_BYTES = 100_000
FREE = Amounts()
WITHIN_S = 40.0
"""Far more than it takes, for machines that are busy."""


def scripted(**bounds: int) -> ScriptedHttp:
    return ScriptedHttp(RequestLimits(), admission=AdmissionSettings(**bounds))


def wait_until_free(service: ScriptedHttp, held: Amounts = FREE) -> None:
    """Args: `held` is what stays in flight."""
    until = time.monotonic() + WITHIN_S
    while service.admission.in_flight != held and time.monotonic() < until:
        time.sleep(0.005)
    assert service.admission.in_flight == held


@pytest.mark.parametrize("accept", [JSON, ARROW, NDJSON])
async def test_a_request_holds_its_rollouts_until_its_response_has_been_sent(accept: str) -> None:
    service = scripted()
    while_playing: list[Amounts] = []
    while_sending: list[Amounts] = []
    play = service.environments["math"].step

    async def step(request: Any) -> Any:
        while_playing.append(service.admission.in_flight)
        return await play(request)

    service.environments["math"].step = step  # type: ignore[method-assign]
    body = json.dumps({"samples": [SAMPLE], "num_generations": 2}).encode()
    received = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return received.pop(0) if received else await asyncio.Event().wait()

    async def send(_message: Any) -> None:
        while_sending.append(service.admission.in_flight)

    headers = [(b"accept", accept.encode()), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": "/rollout", "headers": headers, "query_string": b""}
    await service.app(scope, receive, send)
    held = Amounts(rollouts=2, tokens=2 * MAX_MODEL_LEN, body_bytes=len(body))
    assert set(while_playing) == set(while_sending) == {held}
    assert service.admission.in_flight == FREE


def test_a_full_service_refuses_and_says_when_to_come_back() -> None:
    service = scripted(max_rollouts=FULL_ROLLOUTS)
    with ExitStack() as others:
        for _ in range(FULL_ROLLOUTS):
            others.enter_context(service.admission.admitted(0))
        # The body is not even read: it would be refused with 400.
        response = service.post(b"{", x_request_id="mine")
    assert (response.status_code, response.headers["content-type"]) == (429, "application/problem+json")
    retry_after_s = response.headers["retry-after"]
    assert int(retry_after_s) in range(4, 9)
    message = f"4 rollouts are in flight here and admission.max_rollouts allows 4; try again in {retry_after_s} s"
    assert response.json() == {
        "type": "urn:rollout:problem:overloaded",
        "title": "The service is full; nothing was started",
        "status": 429,
        "detail": f"{message}.",
        "errors": [{"field": "", "message": message, "value": None}],
        "request_id": "mine",
    }
    assert not service.has_started_something


def test_a_body_refused_by_its_headers_leaves_the_connection() -> None:
    service = scripted(max_body_bytes=MOST_BODY_BYTES)
    with served(service.app) as url, httpx.Client(base_url=url) as client:
        with service.admission.admitted(MOST_BODY_BYTES - 10):
            refused = client.post("/rollout", content=b" " * MOST_BODY_BYTES)
            with closing(HTTPConnection(url.removeprefix("http://"), timeout=WITHIN_S)) as connection:
                connection.putrequest("POST", "/rollout")
                connection.putheader("content-length", f"{MOST_BODY_BYTES}")
                connection.endheaders()
                assert connection.getresponse().status == 429, "the body is not waited for"
        assert (refused.status_code, refused.json()["type"]) == (429, "urn:rollout:problem:overloaded")
        assert client.post("/rollout", json={"samples": [SAMPLE]}).status_code == 200
        wait_until_free(service)


@pytest.mark.parametrize("sent", [b"", b'{"samples"'])
def test_a_client_that_disconnects_while_it_sends_holds_nothing(sent: bytes) -> None:
    service = scripted()
    with served(service.app) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /rollout HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n" + sent)
            # What was said and has not come is not held.
            wait_until_free(service, Amounts(rollouts=1, tokens=1, body_bytes=len(sent)))
        wait_until_free(service)
