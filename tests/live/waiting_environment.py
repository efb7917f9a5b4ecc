"""A task whose steps say which replica ran them, and write down how they ended: for tests of several replicas."""

import asyncio
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rollout_env import ChatMessage, StepOutcome, TaskEnvironment


class Wait(BaseModel):
    seconds: float = 0.0


class WaitingEnvironment(TaskEnvironment):
    """A step waits for as long as its sample says. Its answer is the id of the replica's process."""

    description = "Waits."
    ExtraEnvInfo = Wait

    def __init__(self, ended_folder: str) -> None:
        """Args: each step that is cancelled makes a file in `ended_folder`."""
        self._ended_folder = Path(ended_folder)
        self._cancelled = 0

    async def step(self, message_log: list[ChatMessage], extra_env_info: Wait) -> StepOutcome:
        try:
            await asyncio.sleep(extra_env_info.seconds)
        except asyncio.CancelledError:
            self._cancelled += 1
            (self._ended_folder / f"{os.getpid()}-{self._cancelled}").touch()
            raise
        return StepOutcome({"role": "user", "content": ""}, reward=1.0, terminated=True, answer=str(os.getpid()))

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        prompts = (f"Wait {seed + number}." for number in range(count))
        return [{"messages": [{"role": "user", "content": prompt}], "extra_env_info": {}} for prompt in prompts]
