"""The ways in which nobody waits for rollouts any more, each with rollouts that generate and rollouts in a step."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from time import monotonic
from typing import Any

import httpx
from ray import serve

from benchmarks.cancellation.endless_environment import TASK_NAME
from deployments.rpc.autoscaling import IN_PROGRESS

ROLLOUTS = 128
"""That generate, and as many that are in a step."""
DEADLINE_S = 15.0
"""By then all of them have begun, also on a busy machine."""
BEGUN_WITHIN_S = 60.0
POLL_S = 0.02
NDJSON = {"Accept": "application/x-ndjson"}
ASYNC = {"Prefer": "respond-async"}
Abandon = Callable[[], Awaitable[float]]
"""Abandons the rollouts. Returns the moment before, in seconds of `monotonic`."""
Way = Callable[[httpx.AsyncClient, list[dict[str, Any]]], Awaitable[Abandon]]
"""Posts the bodies, and returns when the service may have begun with them."""


class RolloutsNotBegun(Exception):
    """The engine and the environment did not have all of the rollouts in time."""


def bodies() -> list[dict[str, Any]]:
    """Of one request whose rollouts generate, and of one whose rollouts are in a step."""
    sample = {"task_name": TASK_NAME, "messages": [{"role": "user", "content": "Wait."}]}
    return [
        {"samples": [sample] * ROLLOUTS, "sampling": {"max_new_tokens": max_new_tokens}} for max_new_tokens in (4000, 1)
    ]


async def hang_up(client: httpx.AsyncClient, posted: list[dict[str, Any]]) -> Abandon:
    """The client closes its connections before it has an answer."""
    calls = [asyncio.create_task(client.post("/v1/rollout", json=body)) for body in posted]

    async def abandon() -> float:
        began = monotonic()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        return began

    return abandon


async def leave_stream(client: httpx.AsyncClient, posted: list[dict[str, Any]]) -> Abandon:
    """The client closes its connections when the streams have begun."""
    streams = AsyncExitStack()
    for body in posted:
        answer = await streams.enter_async_context(client.stream("POST", "/v1/rollout", json=body, headers=NDJSON))
        answer.raise_for_status()

    async def abandon() -> float:
        began = monotonic()
        await streams.aclose()
        return began

    return abandon


async def reach_deadline(client: httpx.AsyncClient, posted: list[dict[str, Any]]) -> Abandon:
    """`deadline_s` has passed; the client gets what there is."""
    began = monotonic()
    calls = [
        asyncio.create_task(client.post("/v1/rollout", json={**body, "deadline_s": DEADLINE_S})) for body in posted
    ]

    async def abandon() -> float:
        await asyncio.sleep(began + DEADLINE_S - monotonic())
        for answer in await asyncio.gather(*calls):
            answer.raise_for_status()
        return began + DEADLINE_S

    return abandon


async def delete(client: httpx.AsyncClient, posted: list[dict[str, Any]]) -> Abandon:
    """The jobs are deleted."""
    answers = [await client.post("/v1/rollout", json=body, headers=ASYNC) for body in posted]
    jobs = [answer.raise_for_status().headers["Location"] for answer in answers]

    async def abandon() -> float:
        began = monotonic()
        for job in jobs:
            (await client.delete(job)).raise_for_status()
        return began

    return abandon


WAYS: dict[str, Way] = {way.__name__: way for way in (hang_up, leave_stream, reach_deadline, delete)}


def in_service() -> tuple[int, int]:
    """Generations that run or wait in the engine, and steps or sessions of the environment; one replica has each."""
    generators: Any = serve.get_deployment_handle("Generator", app_name="rollout")
    environments: Any = serve.get_deployment_handle(TASK_NAME, app_name="rollout")
    generations: int = generators.ongoing_generations.remote().result()
    steps: dict[str, float] = environments.record_autoscaling_stats.remote().result()
    return generations, int(steps[IN_PROGRESS])


async def until_in_service(generations: int, steps: int, within_s: float) -> None:
    """Raises `TimeoutError`."""
    async with asyncio.timeout(within_s):
        while await asyncio.to_thread(in_service) != (generations, steps):
            await asyncio.sleep(POLL_S)


async def seconds_until_given_up(url: str, way: Way, within_s: float) -> float:
    """Has rollouts begun and abandoned, and returns how long engine and environment went on with any of them.

    Raises:
        RolloutsNotBegun: not all of them began.
        TimeoutError: not all of them were given up within `within_s` seconds.
    """
    async with httpx.AsyncClient(base_url=url, timeout=BEGUN_WITHIN_S) as client:
        abandon = await way(client, bodies())
        try:
            await until_in_service(ROLLOUTS, ROLLOUTS, BEGUN_WITHIN_S)
        except TimeoutError as error:
            there = await asyncio.to_thread(in_service)
            with suppress(httpx.HTTPError):
                await abandon()
            raise RolloutsNotBegun(f"{there} of {(ROLLOUTS, ROLLOUTS)} rollouts were under way") from error
        began = await abandon()
        await until_in_service(0, 0, within_s)
        return monotonic() - began
