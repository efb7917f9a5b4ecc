"""Environments that are hosted in a process of their own."""

import asyncio
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, Field

from rollout_env import (
    ChatMessage,
    SampleRejected,
    Session,
    StartOutcome,
    StepOutcome,
    TaskEnvironment,
    TemporaryFailure,
)


class Tally(BaseModel):
    until: int = Field(ge=1)
    count: int = 0


class TallyEnvironment(TaskEnvironment):
    """Keeps its state in `extra_env_info`."""

    description = "Tallies."
    ExtraEnvInfo = Tally
    tools = ({"type": "function", "function": {"name": "tally"}},)

    def __init__(self, greeting: str = "Go.") -> None:
        self.greeting = greeting

    def start(self, message_log: list[ChatMessage], extra_env_info: Tally) -> StartOutcome:
        return StartOutcome(observation={"role": "user", "content": self.greeting})

    async def step(self, message_log: list[ChatMessage], extra_env_info: Tally) -> StepOutcome:
        match message_log[-1]["content"]:
            case "reject":
                raise SampleRejected("There is no such tally.")
            case "lose":
                raise TemporaryFailure("The ink is out.")
            case "raise":
                raise KeyError("tally")
            case "die":
                os._exit(3)
            case "nan":
                return StepOutcome({"role": "user", "content": ""}, float("nan"), terminated=False)
            case "silent":
                return StepOutcome(None, 1.0, terminated=True)
            case "paint":
                return StepOutcome({"role": "user", "content": "", "images": [b"\x89PNG"]}, 1.0, terminated=True)
            case "wait":
                await asyncio.Event().wait()
        count = extra_env_info.count + 1
        text = str(os.getpid() if message_log[-1]["content"] == "who?" else count)
        state = {"until": extra_env_info.until, "count": count}
        return StepOutcome({"role": "user", "content": text}, {"tally": 1.0}, count == extra_env_info.until, state)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{"extra_env_info": {"until": seed + number + 1}} for number in range(count)]


class Memory(Session):
    def __init__(self) -> None:
        self.count = 0

    def step(self, message_log: list[ChatMessage], extra_env_info: Tally) -> StepOutcome:
        self.count += 1
        return StepOutcome({"role": "user", "content": str(self.count)}, 1.0, self.count == extra_env_info.until)


class MemoryEnvironment(TallyEnvironment):
    """Keeps its state in a session."""

    max_sessions = 7
    lost_session = "fail"

    def open_session(self, message_log: list[ChatMessage], extra_env_info: Tally) -> Session:
        return Memory()


class ForkedMemoryEnvironment(MemoryEnvironment):
    """Makes a session that remembers the responses of a log."""

    def fork_session(self, message_log: list[ChatMessage], extra_env_info: Tally) -> Session:
        memory = Memory()
        memory.count = sum(message["role"] == "assistant" for message in message_log)
        return memory


def wait_until_it_answers(environment: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            environment()
        except TemporaryFailure:
            time.sleep(0.05)
        else:
            return
