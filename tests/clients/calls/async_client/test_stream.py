"""Rollouts that arrive one by one, against a scripted service."""

import asyncio
import json
import time
from collections.abc import Iterator

import pytest
from fastapi.responses import StreamingResponse

from rollout_client import AsyncRolloutClient, RolloutTimeout, ServiceFailed, StreamBroken
from rollout_client.contract.rollouts import RequestMetrics
from rollout_client.errors import ResponseNotUnderstood
from tests.clients.client_calls import breaking_server, call, stream
from tests.clients.scripted_service import (
    HUNG_UP_WITHIN_S,
    SUMMARY,
    Json,
    ScriptedService,
    lines_of,
    ndjson,
    result,
    sample,
)
from tests.growing_limits import in_the_middle
from tests.virtual_time import runs

FAILED: Json = {"type": "about:blank", "title": "Generation failed", "status": 500, "detail": "The engine is gone."}


def test_a_stream_gives_each_sample_with_its_position_as_it_ends(service: ScriptedService) -> None:
    placed = stream(service.url, sample(), sample(), num_generations=2)
    found = [(position, played.idx, played.generation_index) for position, played in placed]
    assert found == [(3, 1, 1), (2, 1, 0), (1, 0, 1), (0, 0, 0)]


def test_the_summary_is_there_after_the_last_sample_and_an_error_before(service: ScriptedService) -> None:
    async def read(client: AsyncRolloutClient) -> tuple[int, int, RequestMetrics]:
        async with client.stream([sample()]) as rollouts:
            with pytest.raises(RuntimeError, match="iterate to the end first"):
                _ = rollouts.summary
            count = len([played async for played in rollouts])
        return count, rollouts.expected, rollouts.summary.metrics

    assert call(service.url, read) == (1, 1, SUMMARY["metrics"])


@runs
async def test_leaving_a_stream_early_ends_the_request(service: ScriptedService) -> None:
    service.rollouts.append(lambda _: service.hanging({"position": 0, "sample": result()}))
    async with AsyncRolloutClient(service.url) as client:
        async with client.stream([sample(), sample()]) as rollouts:
            async for _ in rollouts:
                break
        assert await asyncio.to_thread(service.hung_up.wait, HUNG_UP_WITHIN_S)


def test_a_problem_in_a_stream_is_raised_after_the_samples_before_it(service: ScriptedService) -> None:
    service.rollouts.append(lambda _: ndjson({"position": 1, "sample": result(1)}, {"problem": FAILED}))

    async def read(client: AsyncRolloutClient) -> None:
        async with client.stream([sample(), sample()]) as rollouts:
            samples = aiter(rollouts)
            assert (await anext(samples)).idx == 1
            with pytest.raises(ServiceFailed, match=r"^Generation failed \(500\): The engine is gone\.$"):
                await anext(samples)

    call(service.url, read)
    assert len(service.bodies) == 1


@pytest.mark.parametrize(
    ("lines", "error", "message"),
    [
        ([], StreamBroken, "ended after 0 of 2 rollouts, without summary"),
        ([{"position": 0, "sample": result()}], StreamBroken, "ended after 1 of 2 rollouts, without summary"),
        ([{"summary": SUMMARY}], StreamBroken, "The summary came after 0 of 2 rollouts"),
        ([{"position": 2, "sample": result()}], ResponseNotUnderstood, "position that is not expected: 2"),
        ([{"position": 0, "sample": result()}] * 2, ResponseNotUnderstood, "position that is not expected: 0"),
        ([{"sample": result()}], ResponseNotUnderstood, "position that is not expected: None"),
        ([{"news": 1}], ResponseNotUnderstood, "has no sample, summary or problem"),
        ([{"position": "x"}], ResponseNotUnderstood, "is not what this client knows at position"),
        ([*lines_of({"samples": [sample()] * 2}), {"news": 1}], ResponseNotUnderstood, "came after its summary"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(
    service: ScriptedService, lines: list[Json], error: type[Exception], message: str
) -> None:
    service.rollouts.append(lambda _: ndjson(*lines))
    with pytest.raises(error, match=message):
        stream(service.url, sample(), sample())
    assert len(service.bodies) == 1


@pytest.mark.usefixtures("service")
def test_a_connection_lost_during_a_stream_is_broken() -> None:
    line = json.dumps({"position": 0, "sample": result()}).encode() + b"\n"
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = head + b"%x\r\n%s\r\n" % (len(line), line)
    with breaking_server([answer]) as (url, _), pytest.raises(StreamBroken, match="The response broke off"):
        stream(url, sample(), sample())


@pytest.mark.slow
def test_a_rollout_longer_than_timeout_s_is_ended(service: ScriptedService) -> None:
    def attempt(timeout_s: float) -> bool:
        service.bodies.clear()
        service.rollouts.append(lambda _: service.hanging({"position": 0, "sample": result()}))
        with pytest.raises(RolloutTimeout, match=r"not complete after \d+\.?\d* s"):
            stream(service.url, sample(), sample(), client={"timeout_s": timeout_s})
        return service.hangs.is_set()

    assert in_the_middle(attempt, has_begun=bool)
    assert service.hung_up.wait(HUNG_UP_WITHIN_S)
    assert len(service.bodies) == 1


@pytest.mark.slow
def test_a_stream_that_trickles_on_is_ended_at_timeout_s(service: ScriptedService) -> None:
    def trickle(_: Json) -> StreamingResponse:
        def lines() -> Iterator[bytes]:
            for position in range(1000):
                time.sleep(0.05)
                yield json.dumps({"position": position, "sample": result()}).encode() + b"\n"

        return StreamingResponse(lines())

    service.rollouts.append(trickle)
    started_at = time.monotonic()
    with pytest.raises(RolloutTimeout):
        stream(service.url, *[sample()] * 1000, client={"timeout_s": 0.5})
    assert time.monotonic() - started_at < 45, "the stream was read to its end"
