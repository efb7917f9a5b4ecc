"""The law of rollouts of Harbor's tasks: whatever is killed, none is lost or doubled, and no sandbox is left."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest

from rollout_client import AsyncRolloutClient, Sampling
from rollout_client.contract.rollouts import SampleResult
from rollout_client.errors import RolloutError
from tests.deployments.agents.harbor_rollouts import (
    KILLED,
    processes_with,
    reward_of,
    sample_of,
    strike,
)
from tests.deployments.agents.test_harbor_program import works

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not works(), reason="bubblewrap does not work on this machine"),
]
ROLLOUTS, ROLLOUTS_A_REQUEST = 100, 25
RETRIES = 60
STRUCK = {
    **KILLED,
    "replica": "ServeReplica:rollout:tasks_agent",
    "ingress": "ServeReplica:rollout:Ingress",
}
PAUSES_S = {"replica": 12.0, "ingress": 12.0}
"""Time in which another one takes the place of what was killed."""
GONE_WITHIN_S = 60.0


class Rollouts:
    """All rollouts in several streamed requests, which are posted again with their key when a stream breaks."""

    def __init__(self, client: AsyncRolloutClient) -> None:
        self.client = client
        self.results: dict[int, SampleResult] = {}
        self.changed: list[int] = []
        self.doubled: list[int] = []
        self.posted_again = 0

    async def play(self) -> None:
        numbers = range(ROLLOUTS)
        await asyncio.gather(
            *(self._play(numbers[begin : begin + ROLLOUTS_A_REQUEST]) for begin in numbers[::ROLLOUTS_A_REQUEST])
        )

    async def _play(self, numbers: Sequence[int]) -> None:
        key = uuid4().hex
        while True:
            try:
                await self._follow(numbers, key)
            except RolloutError:
                self.posted_again += 1
                await asyncio.sleep(1)
                continue
            return

    async def _follow(self, numbers: Sequence[int], key: str) -> None:
        brought = Counter[int]()
        samples = [sample_of(number, works_s=0.5) for number in numbers]
        sampling = Sampling(greedy=True, max_new_tokens=8)
        options: Any = {"sampling": sampling, "sample_retries": RETRIES, "idempotency_key": key}
        async with self.client.stream(samples, **options) as rollouts:
            async for position, result in rollouts.with_positions():
                number = numbers[position]
                brought[number] += 1
                self.doubled += [number] if brought[number] > 1 else []
                earlier = self.results.setdefault(number, result)
                self.changed += [number] if earlier.rewards != result.rewards else []


def test_under_kills_no_rollout_is_lost_or_doubled_and_no_sandbox_is_left(small_url: str) -> None:
    draw = random.Random(3)
    struck = Counter[str]()

    async def run() -> Rollouts:
        async with AsyncRolloutClient(small_url, timeout_s=600) as client:
            rollouts = Rollouts(client)
            playing = asyncio.ensure_future(rollouts.play())
            while not playing.done():
                kind = min(STRUCK, key=lambda each: (struck[each], draw.random()))
                if await asyncio.to_thread(strike, STRUCK[kind], draw):
                    struck[kind] += 1
                    await asyncio.wait([playing], timeout=PAUSES_S.get(kind, draw.uniform(0.5, 2.0)))
                else:
                    await asyncio.wait([playing], timeout=0.1)
            await playing
            return rollouts

    rollouts = asyncio.run(run())
    assert (len(rollouts.results), rollouts.doubled, rollouts.changed) == (ROLLOUTS, [], [])
    outcomes = {number: (result.status, result.rewards, result.error) for number, result in rollouts.results.items()}
    assert outcomes == {number: ("completed", {"reward": reward_of(number)}, None) for number in range(ROLLOUTS)}
    assert min(struck[kind] for kind in STRUCK) >= 2, struck
    assert rollouts.posted_again > 0
    ended_at = time.monotonic()
    while left := list(processes_with(KILLED["sandbox"])):
        assert time.monotonic() - ended_at < GONE_WITHIN_S, left
        time.sleep(0.2)
