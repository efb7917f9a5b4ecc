"""The generated half: one test of each kind of call. What both halves do is tested in the half that it comes from."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from rollout_client import RequestRejected, RolloutClient, ServiceFailed
from tests.clients.scripted_service import REJECTED, SUMMARY, ScriptedService, problem, sample, unavailable

SESSION = {"id": "s", "base_url": "http://service/v1/sessions/s", "api_key": "k", "status": "open"}
JOB = {"job_id": "a/b", "state": "completed", "request_id": "r", "created_at": 0, "last_event": 1, "acknowledged": 0}


def test_a_rollout_is_the_same_whole_with_a_bar_and_as_arrow(service: ScriptedService) -> None:
    with RolloutClient(service.url) as client:
        whole = client.rollout([sample(), sample()], num_generations=2)
        assert [(played.idx, played.generation_index) for played in whole.samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert client.rollout([sample(), sample()], num_generations=2, progress=True) == whole
        assert client.rollout_arrow([sample(), sample()], num_generations=2).to_response() == whole


def test_a_stream_yields_each_rollout_as_it_ends_then_its_summary(service: ScriptedService) -> None:
    with RolloutClient(service.url) as client, client.stream([sample(), sample()]) as rollouts:
        assert next(iter(rollouts)).idx == 1
        assert [(position, played.idx) for position, played in rollouts.with_positions()] == [(0, 0)]
    assert rollouts.summary.metrics == SUMMARY["metrics"]


def test_jobs_and_sessions_are_sub_clients_and_a_broken_stream_goes_on() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        requests.append((request.method, request.url.raw_path.decode(), json.loads(request.content or "null")))
        if request.url.path.endswith("/events"):
            return httpx.Response(200, content=streams.pop(0))
        return httpx.Response(200, json=JOB if request.url.path.startswith("/jobs") else SESSION)

    def broken() -> Iterator[bytes]:
        yield b'{"event": 1}\n'
        raise httpx.ReadError("It broke.")

    streams = [broken(), [b'{"event": 1}\n', json.dumps({"event": 2, "summary": SUMMARY}).encode() + b"\n"]]
    requests: list[tuple[str, str, object]] = []
    client = RolloutClient("http://service", http_client=httpx.Client(transport=httpx.MockTransport(answer)))
    assert client.jobs.submit([sample()]).job_id == "a/b"
    assert [(event.event, event.is_last) for event in client.jobs.events("a/b")] == [(1, False), (2, True)]
    client.jobs.delete("a/b")
    with client.sessions.open(sampling={"seed": 1}) as session:
        session.reward({"style": 0.5}, "g1")
        assert (session.base_url, session.api_key) == ("http://service/v1/sessions/s/v1", "k")
    assert requests == [
        ("POST", "/jobs", {"samples": [sample()]}),
        ("GET", "/jobs/a%2Fb/events?after=0", None),
        ("GET", "/jobs/a%2Fb/events?after=1", None),
        ("DELETE", "/jobs/a%2Fb", None),
        ("POST", "/sessions", {"sampling": {"seed": 1}}),
        ("POST", "/sessions/s/reward", {"rewards": {"style": 0.5}, "generation_id": "g1"}),
        ("DELETE", "/sessions/s", None),
    ]


def test_what_may_pass_is_tried_again_and_what_may_not_is_raised(service: ScriptedService, waits: list[float]) -> None:
    service.rollouts += [lambda _: unavailable(), lambda _: unavailable(), lambda _: problem(REJECTED)]
    with RolloutClient(service.url) as client, pytest.raises(RequestRejected, match="there is no task 'maths'"):
        client.rollout([sample()])
    assert waits == [0.5, 1]
    service.rollouts.append(lambda _: unavailable())
    with RolloutClient(service.url) as client, pytest.raises(ServiceFailed):
        client.with_options(retries=0).rollout([sample()])
    assert waits == [0.5, 1]


def test_threads_share_a_client(service: ScriptedService) -> None:
    with RolloutClient(service.url) as client, ThreadPoolExecutor(8) as threads:
        played = list(threads.map(lambda idx: client.rollout([sample(idx=idx)]).samples[0].idx, range(32)))
    assert played == list(range(32))
