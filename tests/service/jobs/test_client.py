"""`client.jobs` and `idempotency_key=`, against ingress replicas that share a job store."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollout_client import AsyncRolloutClient, RequestRejected
from rollout_client.errors import RolloutTimeout
from tests.service.jobs.scripted_ingresses import ScriptedIngresses, request_of, slow_cluster
from tests.virtual_time import end_by_cancellation

REQUEST = request_of(groups=3)
SAMPLES: list[Any] = REQUEST["samples"]
OPTIONS: dict[str, Any] = {name: value for name, value in REQUEST.items() if name != "samples"}


async def test_a_job_is_followed_to_its_end_acknowledged_and_deleted() -> None:
    cluster = ScriptedIngresses()
    jobs = cluster.client(0).jobs
    job = await jobs.submit(SAMPLES, **OPTIONS)
    events = [event async for event in cluster.client(1).jobs.events(job.job_id)]
    assert [event.event for event in events] == [1, 2, 3, 4]
    assert [event.is_last for event in events] == [False, False, False, True]
    assert [event.event async for event in jobs.events(job.job_id, after=3)] == [4]
    assert (await jobs.acknowledge(job.job_id, 2)).acknowledged == 2
    assert (await jobs.status(job.job_id)).state == "completed"
    with pytest.raises(RequestRejected, match="acknowledged"):
        _ = [event async for event in jobs.events(job.job_id)]
    await jobs.delete(job.job_id)
    assert await jobs.all() == []


async def whole(client: AsyncRolloutClient) -> None:
    await client.rollout(SAMPLES, idempotency_key="k", **OPTIONS)


async def streamed(client: AsyncRolloutClient) -> None:
    async with client.stream(SAMPLES, idempotency_key="k", **OPTIONS) as stream:
        await anext(aiter(stream))


@pytest.mark.parametrize("call", [whole, streamed])
async def test_a_cancelled_call_with_a_key_ends_its_run(call: Callable[[AsyncRolloutClient], Awaitable[None]]) -> None:
    cluster = slow_cluster()
    calling = asyncio.ensure_future(call(cluster.client(0)))
    await asyncio.sleep(2)
    assert len(await cluster.all_jobs()) == 1
    await end_by_cancellation(calling)
    await asyncio.sleep(1)
    assert (await cluster.all_jobs(), cluster.generator.cancelled) == ([], 6)


async def test_a_call_that_ran_out_of_time_leaves_its_run_to_the_next() -> None:
    cluster = slow_cluster()
    with pytest.raises(RolloutTimeout):
        async with cluster.client(0).stream(SAMPLES, idempotency_key="k", **OPTIONS):
            raise RolloutTimeout("after 5 s")
    response = await cluster.client(1).rollout(SAMPLES, idempotency_key="k", **OPTIONS)
    assert len(response.samples) == len(cluster.generator.requests) == 6


async def test_the_job_of_a_key_is_deleted_by_its_key() -> None:
    cluster = slow_cluster()
    await cluster.submit(REQUEST, idempotency_key='"k"')
    deleted = await cluster.request(1, "DELETE", "/jobs", headers={"idempotency-key": '"k"'})
    assert (deleted.status_code, await cluster.all_jobs()) == (204, [])
    for headers, status in (({"idempotency-key": '"k"'}, 404), ({}, 422)):
        refused = await cluster.request(1, "DELETE", "/jobs", headers=headers)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (status, "header.Idempotency-Key")
