"""`async_twin`: the asynchronous client that sends through a synchronous one of the caller's."""

import asyncio
import gzip
import json

import httpx
import pytest

from rollout_client import RolloutClient, ServiceUnreachable
from rollout_client.calls.async_twin import async_twin


class Answers:
    """Answers `GET /tasks`, after as many broken connections as it is told."""

    def __init__(self, breaks: int = 0) -> None:
        self.breaks = breaks
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.breaks:
            self.breaks -= 1
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(
            200, content=gzip.compress(json.dumps({"tasks": []}).encode()), headers={"content-encoding": "gzip"}
        )


def caller(answers: Answers) -> httpx.Client:
    return httpx.Client(
        transport=httpx.MockTransport(answers),
        auth=("user", "secret"),
        headers={"x-of-http-client": "mine", "user-agent": "trainer/1"},
        cookies={"session": "abc"},
        params={"tenant": "a"},
    )


async def tasks(client: RolloutClient) -> None:
    async with async_twin(client) as twin:
        assert await twin.tasks() == []


def test_it_sends_through_the_http_client_with_the_settings_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_API_KEY", "of-the-environment")
    answers = Answers()
    with caller(answers) as http:
        client = RolloutClient("http://service/v1", http_client=http, timeout_s=7, headers={"x-of-client": "too"})
        asyncio.run(tasks(client))
        client.tasks()
    ours, direct = answers.requests
    assert (ours.method, ours.url, ours.headers) == (direct.method, direct.url, direct.headers)
    assert str(ours.url) == "http://service/v1/tasks?tenant=a"
    sent = {"x-of-http-client": "mine", "user-agent": "trainer/1", "x-of-client": "too", "cookie": "session=abc"}
    assert sent.items() <= dict(ours.headers).items()
    assert ours.headers["authorization"].startswith("Basic ")
    assert 6 < ours.extensions["timeout"]["read"] <= 7


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_it_tries_as_often_as_the_client(retries: int, attempts: int) -> None:
    answers = Answers(breaks=2)
    with caller(answers) as http:
        client = RolloutClient("http://service", http_client=http, retries=retries)
        if retries:
            asyncio.run(tasks(client))
        else:
            with pytest.raises(ServiceUnreachable, match="refused"):
                asyncio.run(tasks(client))
    assert len(answers.requests) == attempts
