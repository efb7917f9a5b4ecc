"""The generated half: one test of each kind of call. What both halves do is tested in the half that it comes from."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi.responses import PlainTextResponse

from rollout_client import RequestRejected, RolloutClient, ServiceFailed, StreamBroken
from tests.clients.client_calls import breaking_server, json_response
from tests.clients.scripted_policy import PolicyServer, ScriptedPolicy
from tests.clients.scripted_service import (
    HUNG_UP_WITHIN_S,
    REJECTED,
    SUMMARY,
    ScriptedService,
    lines_of,
    ndjson,
    problem,
    result,
    sample,
    unavailable,
)


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


def test_leaving_a_stream_early_ends_the_request(service: ScriptedService) -> None:
    service.rollouts.append(lambda _: service.hanging({"position": 0, "sample": result()}))
    with RolloutClient(service.url) as client:
        with client.stream([sample(), sample()]) as rollouts:
            next(iter(rollouts))
        assert service.hung_up.wait(HUNG_UP_WITHIN_S)


def test_a_stream_that_is_not_whole_is_an_error(service: ScriptedService) -> None:
    service.rollouts.append(lambda body: ndjson(*lines_of(body)[:-1]))
    broken = pytest.raises(StreamBroken, match="ended after 1 of 1 rollouts, without summary")
    with RolloutClient(service.url) as client, client.stream([sample()]) as rollouts, broken:
        list(rollouts)


def test_tasks_and_their_samples_come_ready_to_post(service: ScriptedService) -> None:
    with RolloutClient(service.url) as client:
        assert [task.task_name for task in client.tasks()] == ["math"]
        assert len(client.rollout(client.example_samples("math", count=2)).samples) == 2


@pytest.mark.slow
def test_waiting_until_ready_outlasts_a_start(service: ScriptedService) -> None:
    service.readiness += [PlainTextResponse("no such path", 404), unavailable()]
    with RolloutClient(service.url) as client:
        client.wait_until_ready(timeout_s=10)
    assert not service.readiness


def test_what_may_pass_is_tried_again_and_what_may_not_is_raised(service: ScriptedService, waits: list[float]) -> None:
    service.rollouts += [lambda _: unavailable(), lambda _: unavailable(), lambda _: problem(REJECTED)]
    with RolloutClient(service.url) as client, pytest.raises(RequestRejected, match="there is no task 'maths'"):
        client.rollout([sample()])
    assert waits == [0.5, 1]
    service.rollouts.append(lambda _: unavailable())
    with RolloutClient(service.url) as client, pytest.raises(ServiceFailed):
        client.with_options(retries=0).rollout([sample()])
    assert waits == [0.5, 1]


@pytest.mark.usefixtures("waits")
def test_a_broken_connection_is_tried_again() -> None:
    response = json_response({**SUMMARY, "samples": [result()]})
    with breaking_server([b"", response[:-5], response]) as (url, received), RolloutClient(url) as client:
        assert len(client.rollout([sample()]).samples) == 1
    assert len(received) == 3


def test_threads_share_a_client(service: ScriptedService) -> None:
    with RolloutClient(service.url) as client, ThreadPoolExecutor(8) as threads:
        played = list(threads.map(lambda idx: client.rollout([sample(idx=idx)]).samples[0].idx, range(32)))
    assert played == list(range(32))


@pytest.mark.slow
def test_a_version_is_waited_for() -> None:
    with PolicyServer(ScriptedPolicy()) as policy, RolloutClient(policy.url) as client:
        policy.polls += [0, 0]
        policy.versions[3] = b""
        assert client.wait_for_version(3, timeout_s=10).current == 3
        assert len(policy.asked) == 3
