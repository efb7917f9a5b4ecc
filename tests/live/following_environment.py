"""A task whose samples say what each step answers: for tests of the whole service."""

import asyncio
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rollout_env import ChatMessage, StepOutcome, TaskEnvironment

QUESTION = "What is 20 + 22?"


class Turn(BaseModel):
    observation: str = ""
    reward: float | dict[str, float] = 0.0
    next_stop_strings: list[str] | None = None
    while_there: str | None = None
    """The path of a file: the step ends when it is not there."""

    def waits(self) -> bool:
        return self.while_there is not None and Path(self.while_there).exists()


class Script(BaseModel):
    turns: list[Turn]
    turn: int = 0


class FollowingEnvironment(TaskEnvironment):
    """Answers step after step with the turns of the script, and terminates the rollout with the last."""

    description = "Answers what the sample says."
    ExtraEnvInfo = Script

    async def step(self, message_log: list[ChatMessage], extra_env_info: Script) -> StepOutcome:
        turn = extra_env_info.turns[extra_env_info.turn]
        while turn.waits():
            await asyncio.sleep(0.05)
        following = extra_env_info.model_copy(update={"turn": extra_env_info.turn + 1})
        return StepOutcome(
            {"role": "user", "content": turn.observation},
            turn.reward,
            terminated=following.turn == len(extra_env_info.turns),
            metadata=following.model_dump(),
            next_stop_strings=turn.next_stop_strings,
            answer=message_log[-1]["content"],
        )

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        script = {"turns": [{"observation": f"{seed}"}]}
        return [{"messages": [{"role": "user", "content": "Go."}], "extra_env_info": script}] * count


def following(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A sample of this task, with these turns as its script."""
    prompt = {} if "message_log" in fields else {"messages": [{"role": "user", "content": QUESTION}]}
    return {"task_name": "following", "extra_env_info": {"turns": list(turns)}, **prompt, **fields}
