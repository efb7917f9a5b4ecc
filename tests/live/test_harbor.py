"""The law of rollouts of Harbor's tasks: whatever is killed, none is lost or doubled, and no sandbox is left."""

import asyncio
import random
import time
from collections import Counter

import pytest

from rollout_client import AsyncRolloutClient, Sampling
from rollout_client.contract.rollouts import SampleInput
from rollout_client.errors import RolloutError
from tests.deployments.agents.harbor_rollouts import KILLED, processes_with, reward_of, sample_of, strike
from tests.deployments.agents.test_harbor_program import works
from tests.endurance.chaos.games import Games, Outcome

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not works(), reason="bubblewrap does not work on this machine"),
]
ROLLOUTS = 100
RETRIES = 60
STRUCK = {**KILLED, "replica": "ServeReplica:rollout:tasks_agent", "ingress": "ServeReplica:rollout:Ingress"}
PAUSES_S = {"replica": 12.0, "ingress": 12.0}
"""Time in which another one takes the place of what was killed."""
GONE_WITHIN_S = 60.0


def test_under_kills_no_rollout_is_lost_or_doubled_and_no_sandbox_is_left(small_url: str) -> None:
    draw = random.Random(3)
    struck = Counter[str]()

    async def run() -> Outcome:
        async with AsyncRolloutClient(small_url, timeout_s=600) as client:
            options = {"sampling": Sampling(greedy=True, max_new_tokens=8), "sample_retries": RETRIES}
            samples = [SampleInput.model_validate(sample_of(number, works_s=0.5)) for number in range(ROLLOUTS)]
            games = Games(client, samples, options, broken=RolloutError, counts=lambda result: result.rewards)
            playing = asyncio.create_task(games.play())
            while not playing.done():
                kind = min(STRUCK, key=lambda each: (struck[each], draw.random()))
                if await asyncio.to_thread(strike, STRUCK[kind], draw):
                    struck[kind] += 1
                    await asyncio.wait([playing], timeout=PAUSES_S.get(kind, draw.uniform(0.5, 2.0)))
                else:
                    await asyncio.wait([playing], timeout=0.1)
            return await playing

    outcome = asyncio.run(run())
    assert (outcome.twice, outcome.errors) == (0, [])
    results = {number: (result.status, result.rewards, result.error) for number, result in outcome.results.items()}
    assert results == {number: ("completed", {"reward": reward_of(number)}, None) for number in range(ROLLOUTS)}
    assert min(struck[kind] for kind in STRUCK) >= 2, struck
    assert outcome.posted_again > 0
    ended_at = time.monotonic()
    while left := list(processes_with(KILLED["sandbox"])):
        assert time.monotonic() - ended_at < GONE_WITHIN_S, left
        time.sleep(0.2)
