"""A task whose steps say which replica ran them, and write down how they ended: for tests of several replicas."""

import asyncio
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rollout_env import ChatMessage, StepOutcome, TaskEnvironment


class Wait(BaseModel):
    seconds: float = 0.0
    while_held: bool = False
    """Whether it makes a file `began-*`, and waits while the file `held` is there."""


class WaitingEnvironment(TaskEnvironment):
    """A step waits for as long as its sample says. Its answer is the id of the replica's process."""

    description = "Waits."
    ExtraEnvInfo = Wait

    def __init__(self, ended_folder: str) -> None:
        """Args: each step that is cancelled makes a file `ended-*` in `ended_folder`, where all files are."""
        self._ended_folder = Path(ended_folder)
        self._cancelled = 0
        self._began = 0

    async def step(self, message_log: list[ChatMessage], extra_env_info: Wait) -> StepOutcome:
        try:
            await asyncio.sleep(extra_env_info.seconds)
            if extra_env_info.while_held:
                self._began += 1
                (self._ended_folder / f"began-{os.getpid()}-{self._began}").touch()
            while extra_env_info.while_held and (self._ended_folder / "held").exists():
                await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            self._cancelled += 1
            (self._ended_folder / f"ended-{os.getpid()}-{self._cancelled}").touch()
            raise
        return StepOutcome({"role": "user", "content": ""}, reward=1.0, terminated=True, answer=str(os.getpid()))

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        prompts = (f"Wait {seed + number}." for number in range(count))
        return [{"messages": [{"role": "user", "content": prompt}], "extra_env_info": {}} for prompt in prompts]
