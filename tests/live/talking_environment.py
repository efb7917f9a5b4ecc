"""A task that prints, warns and raises: for tests of what reaches the console."""

import logging
import sys
from typing import Any

from pydantic import BaseModel

from rollout_env import ChatMessage, StepOutcome, TaskEnvironment


class Say(BaseModel):
    text: str
    raises: bool = False


class TalkingEnvironment(TaskEnvironment):
    """Prints its arguments, then what each sample says."""

    description = "Prints what the sample says."
    ExtraEnvInfo = Say

    def __init__(self, greeting: str, fails_to_start: bool = False) -> None:
        print(greeting)  # noqa: T201
        if fails_to_start:
            raise OSError("no board to play on")

    async def step(self, message_log: list[ChatMessage], extra_env_info: Say) -> StepOutcome:
        if extra_env_info.raises:
            raise ValueError(extra_env_info.text)
        print(extra_env_info.text)  # noqa: T201
        sys.stderr.write(f"{extra_env_info.text} on stderr\n")
        logging.getLogger("talking").info("only in the log: %s", extra_env_info.text)
        logging.getLogger("talking").warning("%s as a warning", extra_env_info.text)
        return StepOutcome({"role": "user", "content": ""}, reward=0.0, terminated=True)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{"messages": [{"role": "user", "content": "Go."}], "extra_env_info": {"text": f"{seed}"}}] * count
