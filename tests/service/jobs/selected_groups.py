"""Ingresses whose environment rewards each rollout by a table, after a time that a seed draws."""

import asyncio
import random
from typing import Any

from deployments.protocols.environments import StepRequest
from rollout_env import StepOutcome
from tests.service.jobs.scripted_ingresses import ScriptedIngresses
from tests.service.jobs.test_cursor import Rows
from tests.service.scripted import ScriptedEnvironment, ScriptedGenerator

TABLE = ["10", "11", "00", "01", "00", "10", "11", "01", "10", "00", "11", "10", "01", "11", "10", "00"]
"""The rewards of the rollouts of the sample at each place of the data."""
VARIED = [place for place, rewards in enumerate(TABLE) if len(set(rewards)) == 2]


class TableEnvironment(ScriptedEnvironment):
    """Ends each rollout with its reward in the table, after 1 to `slowest_s` seconds."""

    def __init__(self, seed: int, slowest_s: int) -> None:
        super().__init__([])
        self._draw = random.Random(seed)
        self._slowest_s = slowest_s

    async def step(self, request: StepRequest) -> StepOutcome:
        self.requests.append(request)
        place: Any = request.extra_env_info["place"]
        await asyncio.sleep(self._draw.randint(1, self._slowest_s))
        reward = float(TABLE[place % len(TABLE)][int(request.rollout_id.rsplit("-", 1)[1])])
        return StepOutcome([], {"correct": reward}, terminated=True)


def cluster(seed: int = 0, slowest_s: int = 20) -> ScriptedIngresses:
    environment = TableEnvironment(seed, slowest_s)
    return ScriptedIngresses(generator=ScriptedGenerator(["A"]), environment=environment, data=Rows())


def request_for(groups: int, **fields: Any) -> dict[str, Any]:
    """Keeps groups whose rewards differ."""
    keep = {"groups": groups, "where": {"reward_std": {"gt": 0}}, **fields.pop("keep", {})}
    drawn = {"task_name": "task", "start": 0, "count": 4}
    return {"samples_from": [drawn], "num_generations": 2, "keep": keep, **fields}
