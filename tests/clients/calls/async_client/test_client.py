"""Options of the client and of its calls, and waiting for the service."""

import asyncio
import json
import sys

import httpx
import pytest
from fastapi.responses import PlainTextResponse

from rollout_client import AsyncRolloutClient, RequestRejected, ServiceUnreachable, __version__
from tests.clients.client_calls import call, play, recording
from tests.clients.scripted_service import ScriptedService, sample, unavailable
from tests.virtual_time import runs

NOBODY = "http://127.0.0.1:1"
"""Nothing listens there."""


def test_waiting_until_ready_outlasts_a_start(service: ScriptedService, waits: list[float]) -> None:
    service.readiness += [PlainTextResponse("no such path", 404), unavailable(), PlainTextResponse("starting", 500)]
    call(service.url, lambda client: client.wait_until_ready(timeout_s=60))
    assert (len(service.readiness), waits) == (0, [0.5, 0.5, 0.5])


def test_a_service_that_does_not_get_ready_says_why(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_client.retry.READY_POLL_S", 60.0)
    service.readiness.append(unavailable())
    reason = rf"^{service.url} is not ready after 30 s\. Not now \(503\): No replica is ready\.$"
    with pytest.raises(ServiceUnreachable, match=reason):
        call(service.url, lambda client: client.wait_until_ready(timeout_s=30))


async def test_an_http_client_of_the_caller_sends_the_requests_and_stays_open() -> None:
    http_client, requests = recording()
    async with AsyncRolloutClient("http://nowhere/at/", http_client=http_client) as client:
        await client.rollout([sample()])
    assert not http_client.is_closed
    assert [str(request.url) for request in requests] == ["http://nowhere/at/rollout"]


def test_a_request_has_the_versions_and_the_headers_of_the_client() -> None:
    http_client, requests = recording(headers={"x-team": "theirs", "x-other": "kept"})
    client = AsyncRolloutClient("http://nowhere", headers={"X-Team": "ours"}, http_client=http_client)
    asyncio.run(client.rollout([sample()]))
    [headers] = [request.headers for request in requests]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert headers["user-agent"] == f"rollout-client/{__version__} python/{python} httpx/{httpx.__version__}"
    assert (headers["x-team"], headers["x-other"]) == ("ours", "kept")


def test_an_http_client_keeps_the_user_agent_that_its_owner_gave_it() -> None:
    http_client, requests = recording(headers={"User-Agent": "trainer/3"})
    asyncio.run(AsyncRolloutClient("http://nowhere", http_client=http_client).rollout([sample()]))
    assert requests[0].headers["user-agent"] == "trainer/3"


def test_the_request_id_of_a_call_is_a_header_and_no_field() -> None:
    http_client, requests = recording()
    client = AsyncRolloutClient("http://nowhere", http_client=http_client)
    asyncio.run(client.rollout([sample()], request_id="step-7", timeout_s=5, retries=1, sample_retries=2))
    [request] = requests
    assert request.headers["x-request-id"] == "step-7"
    assert json.loads(request.content) == {"samples": [sample()], "retries": 2}


async def test_a_client_with_other_options_shares_connections_left_open() -> None:
    http_client, requests = recording()
    client = AsyncRolloutClient("http://nowhere", headers={"x-a": "1"}, retries=0, http_client=http_client)
    async with client.with_options(headers={"x-b": "2"}, timeout_s=9) as other:
        await other.rollout([sample()])
    await client.rollout([sample()])
    with_both, own = requests
    assert (with_both.headers["x-a"], with_both.headers["x-b"], own.headers["x-a"]) == ("1", "2", "1")
    assert "x-b" not in own.headers
    assert 8 < with_both.extensions["timeout"]["read"] <= 9
    assert own.extensions["timeout"]["read"] is None


@runs
async def test_a_client_closes_connections_of_its_own() -> None:
    client = AsyncRolloutClient(NOBODY, retries=0)
    async with client.with_options(retries=0):
        pass
    with pytest.raises(ServiceUnreachable):
        await client.tasks()
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await client.tasks()


def test_an_error_shows_the_request_id_of_its_response(service: ScriptedService) -> None:
    service.rollouts.append(lambda _: PlainTextResponse("no\n", 404, {"x-request-id": "abc"}))
    with pytest.raises(RequestRejected, match=r"^Not Found \(404\): no \(request id abc\)$") as rejected:
        play(service.url, sample())
    assert rejected.value.request_id == "abc"
