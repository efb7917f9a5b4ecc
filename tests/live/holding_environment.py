"""A task whose rollouts hold a count in the memory of one replica, for tests of several replicas."""

import asyncio
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rollout_env import ChatMessage, Session, StepOutcome, TaskEnvironment


class Hold(BaseModel):
    steps: int = 4
    waits_at: int | None = None
    """The step that takes for ever, while the file `held` is there."""


class HoldingSession(Session):
    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self._file = folder / f"open-{os.getpid()}-{number}"
        self._file.touch()
        self._count = 0

    async def step(self, message_log: list[ChatMessage], extra_env_info: Hold) -> StepOutcome:
        while self._count + 1 == extra_env_info.waits_at and (self._folder / "held").exists():
            await asyncio.sleep(0.1)
        self._count += 1
        content = f"{os.getpid()}:{self._count}"
        return StepOutcome({"role": "user", "content": content}, 1.0, terminated=self._count == extra_env_info.steps)

    def close(self) -> None:
        self._file.unlink()


class HoldingEnvironment(TaskEnvironment):
    """Each open session is a file. The observation of a step is the process and the count of its session."""

    description = "Holds a count."
    ExtraEnvInfo = Hold

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._opened = 0

    async def open_session(self, message_log: list[ChatMessage], extra_env_info: Hold) -> Session:
        self._opened += 1
        return HoldingSession(self._folder, self._opened)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        prompts = (f"Hold {seed + number}." for number in range(count))
        return [{"messages": [{"role": "user", "content": prompt}], "extra_env_info": {}} for prompt in prompts]
