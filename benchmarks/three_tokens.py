"""An environment that takes almost no time, so that everything else is measured."""

from typing import Any

from pydantic import BaseModel

from rollout_env import ChatMessage, StepOutcome, TaskEnvironment

THREE_TOKENS = "go."
"""One token a character in the embedded model, with `observation_format: raw`."""


class Nothing(BaseModel):
    pass


class ThreeTokens(TaskEnvironment):
    """Never terminates, so that `max_rollout_turns` ends each rollout; has no reward and no state."""

    description = "Answers three tokens, whatever is said."
    ExtraEnvInfo = Nothing

    async def step(self, message_log: list[ChatMessage], extra_env_info: Nothing) -> StepOutcome:  # noqa: ARG002
        return StepOutcome({"role": "user", "content": THREE_TOKENS}, reward=0.0, terminated=False)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        prompts = (f"Say something about {seed + number}." for number in range(count))
        return [{"messages": [{"role": "user", "content": prompt}], "observation_format": "raw"} for prompt in prompts]
