"""The ways in which nobody waits for rollouts any more, each with rollouts that generate and rollouts in a step."""

import asyncio
from functools import partial
from time import monotonic
from typing import Any
from uuid import uuid4

import httpx
from ray import serve

from benchmarks.cancellation.endless_environment import TASK_NAME
from benchmarks.cancellation.measuring import Abandon, Work, cancelled, generations, streams_left
from deployments.rpc.autoscaling import IN_PROGRESS

ROLLOUTS = 128
"""That generate, and as many that are in a step."""
DEADLINE_S = 15.0
"""By then all of them have begun, also on a busy machine."""
NDJSON = {"Accept": "application/x-ndjson"}


def bodies() -> list[dict[str, Any]]:
    """Of one request whose rollouts generate, and of one whose rollouts are in a step."""
    sample = {"task_name": TASK_NAME, "messages": [{"role": "user", "content": "Wait."}]}
    return [
        {"samples": [sample] * ROLLOUTS, "sampling": {"max_new_tokens": max_new_tokens}} for max_new_tokens in (4000, 1)
    ]


async def hang_up(client: httpx.AsyncClient) -> Abandon:
    """The client closes its connections before it has an answer."""
    return partial(cancelled, [asyncio.create_task(client.post("/v1/rollout", json=body)) for body in bodies()])


async def leave_stream(client: httpx.AsyncClient) -> Abandon:
    """The client closes its connections when the streams have begun."""
    return await streams_left(client, "/v1/rollout", bodies(), NDJSON)


async def reach_deadline(client: httpx.AsyncClient) -> Abandon:
    """`deadline_s` has passed; the client gets what there is."""
    began = monotonic()
    calls = [
        asyncio.create_task(client.post("/v1/rollout", json={**body, "deadline_s": DEADLINE_S})) for body in bodies()
    ]

    async def abandon() -> float:
        await asyncio.sleep(began + DEADLINE_S - monotonic())
        for answer in await asyncio.gather(*calls):
            answer.raise_for_status()
        return began + DEADLINE_S

    return abandon


async def delete(client: httpx.AsyncClient) -> Abandon:
    """The jobs are deleted."""
    answers = [await client.post("/v1/jobs", json=body) for body in bodies()]
    jobs = [answer.raise_for_status().headers["Location"] for answer in answers]

    async def abandon() -> float:
        began = monotonic()
        for job in jobs:
            (await client.delete(job)).raise_for_status()
        return began

    return abandon


async def delete_keyed(client: httpx.AsyncClient) -> Abandon:
    """The runs of requests with a key are deleted, by the key, while their callers wait for them."""
    keys = [{"Idempotency-Key": f'"{uuid4().hex}"'} for _ in bodies()]
    calls = [
        asyncio.create_task(client.post("/v1/rollout", json=body, headers=key))
        for body, key in zip(bodies(), keys, strict=True)
    ]

    async def abandon() -> float:
        began = monotonic()
        for key in keys:
            (await client.delete("/v1/jobs", headers=key)).raise_for_status()
        await asyncio.wait(calls)
        return began

    return abandon


def in_service() -> tuple[int, int]:
    """Generations that run or wait in the engine, and steps or sessions of the environment; one replica has each."""
    environments: Any = serve.get_deployment_handle(TASK_NAME, app_name="rollout")
    steps: dict[str, float] = environments.record_autoscaling_stats.remote().result()
    return generations(), int(steps[IN_PROGRESS])


ROLLOUT_WORK = Work(
    {way.__name__: way for way in (hang_up, leave_stream, reach_deadline, delete, delete_keyed)},
    in_service,
    (ROLLOUTS, ROLLOUTS),
)
