"""An environment whose sessions wait for ever in a step."""

import asyncio
from typing import Any

from pydantic import BaseModel

from rollout_env import ChatMessage, Session, StepOutcome, TaskEnvironment

TASK_NAME = "endless"


class Nothing(BaseModel):
    pass


class EndlessSession(Session):
    async def step(self, message_log: list[ChatMessage], extra_env_info: Nothing) -> StepOutcome:  # noqa: ARG002
        await asyncio.Event().wait()
        raise AssertionError("nothing sets the event")

    def close(self) -> None:
        """Holds nothing but its place in the count of sessions."""


class EndlessEnvironment(TaskEnvironment):
    description = "Waits for ever."
    ExtraEnvInfo = Nothing

    async def open_session(self, message_log: list[ChatMessage], extra_env_info: Nothing) -> Session:  # noqa: ARG002
        return EndlessSession()

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        prompts = (f"Wait {seed + number}." for number in range(count))
        return [{"messages": [{"role": "user", "content": prompt}], "extra_env_info": {}} for prompt in prompts]
