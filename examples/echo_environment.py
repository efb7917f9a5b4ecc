"""The smallest environment: the model must say a word. Learn from it which parts an environment has."""

from typing import Any

from pydantic import BaseModel

from rollout_env import ChatMessage, StepOutcome, TaskEnvironment


class Echo(BaseModel):
    """The `extra_env_info` of a sample: what a step needs to judge the reply."""

    word: str


class EchoEnvironment(TaskEnvironment):
    description = "Say the word."
    ExtraEnvInfo = Echo

    async def step(self, message_log: list[ChatMessage], extra_env_info: Echo) -> StepOutcome:
        said = extra_env_info.word in message_log[-1]["content"]
        return StepOutcome(
            observation={"role": "user", "content": "Thanks." if said else "No. Try again."},
            reward=float(said),
            terminated=said,
        )

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        words = [f"hello{number}" for number in range(seed, seed + count)]
        return [
            {"messages": [{"role": "user", "content": f"Say {word}."}], "extra_env_info": {"word": word}}
            for word in words
        ]
