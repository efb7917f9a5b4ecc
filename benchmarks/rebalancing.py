"""Replicas that start in the middle of a request: how soon they carry their part of it, on simulated engines."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import aiohttp
from ray import serve
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from benchmarks.rollout_load import NEW_TOKENS, play
from benchmarks.scale_service import measured, with_timing
from deployments.rpc.handle_calls import live_replicas_of
from service.startup.readiness import deploy

FLEET = 4
TIMING: Mapping[str, float] = {
    "time_to_first_token_s": 0.1,
    "time_per_token_s": 0.05,
    "max_num_seqs": 128,
    "length_spread": 0.5,
}
TURN_S = TIMING["time_to_first_token_s"] + NEW_TOKENS * TIMING["time_per_token_s"]
"""Of the longest turn."""
SAMPLES, TURNS = 4096, 8
WARM_UP_SAMPLES = 64
SETTLE_S = 5.0
MEASURED_S = 15.0
"""Before the fleet grows, and two turns after it has grown."""
POLL_S = 0.1
GROW_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """Generations a second before and after, and the parts of the replicas that carry least and most, in percent."""

    turns_per_s_of_one: float
    turns_per_s_of_four: float
    after_over_before: float
    least_share_percent: float
    most_share_percent: float


def rebalancing(settings: ServeDeploySchema, console: Console) -> Rebalancing:
    one, four = (with_timing(settings, TIMING, replicas) for replicas in (1, FLEET))
    return measured(one, partial(grow_in_the_middle, to=four, running=one, console=console), console)


async def grow_in_the_middle(
    session: aiohttp.ClientSession, to: ServeDeploySchema, running: ServeDeploySchema, console: Console
) -> Rebalancing:
    fleet = Fleet()
    to.http_options.port = running.http_options.port
    await play(session, WARM_UP_SAMPLES, turns=1)
    with console.status(f"{SAMPLES} samples on one replica, then on {FLEET}"):
        playing = asyncio.create_task(play(session, SAMPLES, TURNS))
        await asyncio.sleep(SETTLE_S)
        before = (await fleet.ended_within(MEASURED_S)).total() / MEASURED_S
        await asyncio.to_thread(deploy, to)
        await fleet.wait_for(FLEET)
        await asyncio.sleep(2 * TURN_S)
        after = await fleet.ended_within(MEASURED_S)
        if playing.done():
            raise RuntimeError("The request ended before the measurement.")
        await playing
    return Rebalancing(
        turns_per_s_of_one=before,
        turns_per_s_of_four=after.total() / MEASURED_S,
        after_over_before=after.total() / MEASURED_S / before,
        least_share_percent=100 * min(after.values()) / after.total(),
        most_share_percent=100 * max(after.values()) / after.total(),
    )


class Fleet:
    """The generator replicas of the running service."""

    def __init__(self) -> None:
        self._handle: Any = serve.get_deployment_handle("Generator", app_name="rollout")

    async def ended_within(self, seconds: float) -> Counter[str]:
        """How many generations end on each replica."""
        before = await self._ended()
        began = perf_counter()
        await asyncio.sleep(seconds - (perf_counter() - began))
        after = await self._ended()
        return Counter({name: count - before.get(name, 0) for name, count in after.items()})

    async def wait_for(self, replicas: int) -> None:
        """Raises `TimeoutError` if there are not so many in time."""
        async with asyncio.timeout(GROW_TIMEOUT_S):
            while len(live_replicas_of(self._handle)) < replicas:
                await asyncio.sleep(POLL_S)

    async def _ended(self) -> dict[str, int]:
        if not live_replicas_of(self._handle):
            await self._handle.describe.remote()
        names = live_replicas_of(self._handle)
        counts = await asyncio.gather(
            *(self._handle.options(session_id=name).ended_generations.remote() for name in names)
        )
        return dict(zip(names, counts, strict=True))
