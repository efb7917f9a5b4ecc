"""The ways in which nobody waits for rollouts any more, each with rollouts that generate and rollouts in a step."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import httpx
from pydantic import BaseModel
from ray import serve

from deployments.rpc.autoscaling import IN_PROGRESS
from rollout_env import ChatMessage, Session, StepOutcome, TaskEnvironment

TASK_NAME = "endless"
ROLLOUTS = 128
"""That generate, and as many that are in a step."""
BEGUN_WITHIN_S = 60.0
DEADLINE_S = 15.0
"""By then all of them have begun, also on a busy machine."""
POLL_S = 0.02
NDJSON = {"Accept": "application/x-ndjson"}
Abandon = Callable[[], Awaitable[None]]


class Nothing(BaseModel):
    pass


class EndlessSession(Session):
    async def step(self, message_log: list[ChatMessage], extra_env_info: Nothing) -> StepOutcome:
        await asyncio.Event().wait()
        raise AssertionError("nothing sets the event")

    def close(self) -> None:
        """Holds nothing but its place in the count of sessions."""


class EndlessEnvironment(TaskEnvironment):
    """An environment whose sessions wait for ever in a step."""

    description = "Waits for ever."
    ExtraEnvInfo = Nothing

    async def open_session(self, message_log: list[ChatMessage], extra_env_info: Nothing) -> Session:
        return EndlessSession()

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        prompts = (f"Wait {seed + number}." for number in range(count))
        return [{"messages": [{"role": "user", "content": prompt}], "extra_env_info": {}} for prompt in prompts]


def bodies() -> list[dict[str, Any]]:
    """Of one request whose rollouts generate, and of one whose rollouts are in a step."""
    sample = {"task_name": TASK_NAME, "messages": [{"role": "user", "content": "Wait."}]}
    return [
        {"samples": [sample] * ROLLOUTS, "sampling": {"max_new_tokens": max_new_tokens}} for max_new_tokens in (4000, 1)
    ]


async def leave_stream(client: httpx.AsyncClient) -> Abandon:
    """The client closes its connections when the streams have begun."""
    streams = AsyncExitStack()
    for body in bodies():
        answer = await streams.enter_async_context(client.stream("POST", "/v1/rollout", json=body, headers=NDJSON))
        answer.raise_for_status()
    return streams.aclose


async def reach_deadline(client: httpx.AsyncClient) -> Abandon:
    """`deadline_s` has passed; the client gets what there is."""
    limited = [{**body, "deadline_s": DEADLINE_S} for body in bodies()]
    calls = [asyncio.create_task(client.post("/v1/rollout", json=body)) for body in limited]

    async def abandon() -> None:
        for answer in await asyncio.gather(*calls):
            answer.raise_for_status()

    return abandon


async def delete_keyed(client: httpx.AsyncClient) -> Abandon:
    """The runs of requests with a key are deleted, by the key, while their callers wait for them."""
    keys = [{"Idempotency-Key": f'"{uuid4().hex}"'} for _ in bodies()]
    posted = zip(bodies(), keys, strict=True)
    calls = [asyncio.create_task(client.post("/v1/rollout", json=body, headers=key)) for body, key in posted]

    async def abandon() -> None:
        for key in keys:
            (await client.delete("/v1/jobs", headers=key)).raise_for_status()
        await asyncio.wait(calls)

    return abandon


WAYS = {way.__name__: way for way in (leave_stream, reach_deadline, delete_keyed)}


def in_service() -> tuple[int, int]:
    """Generations that run or wait in the engine, and steps or sessions of the environment; one replica has each."""
    generators, environments = (serve.get_deployment_handle(name, "rollout") for name in ("Generator", TASK_NAME))
    steps: dict[str, float] = environments.record_autoscaling_stats.remote().result()
    return generators.ongoing_generations.remote().result(), int(steps[IN_PROGRESS])


async def begin_and_abandon(of_client: dict[str, Any], way: str, given_up_within_s: float) -> None:
    """Begins all of the rollouts and abandons them; raises `TimeoutError` if the service goes on with any of them.

    Args:
        of_client: the arguments of a client of httpx.
    """
    async with httpx.AsyncClient(**of_client | {"timeout": BEGUN_WITHIN_S}) as client:
        abandon = await WAYS[way](client)
        await until((ROLLOUTS, ROLLOUTS), BEGUN_WITHIN_S)
        await abandon()
        await until((0, 0), given_up_within_s)


async def until(expected: tuple[int, int], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while await asyncio.to_thread(in_service) != expected:
            await asyncio.sleep(POLL_S)
