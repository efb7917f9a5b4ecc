"""Programs of agents whose tools take their time and answer long texts."""

import asyncio
import random
from typing import Any

from pydantic import BaseModel

from benchmarks.workload import HIGHEST_ORDINARY_ID, LOWEST_ORDINARY_ID
from rollout_env import ChatMessage, StepOutcome, TaskEnvironment

NEW_TOKENS = 32
"""Of each turn."""
UNIT_S = 0.25


class AnswersToCome(BaseModel):
    """The seconds and the length of each answer that a program still gets."""

    answers: list[tuple[float, int]]


class SlowTools(TaskEnvironment):
    """Answers after its time, a token a character in the embedded model; ends the program after the last answer."""

    description = "Tools that take their time and answer long texts."
    ExtraEnvInfo = AnswersToCome

    async def step(self, message_log: list[ChatMessage], extra_env_info: AnswersToCome) -> StepOutcome:  # noqa: ARG002
        if not extra_env_info.answers:
            return StepOutcome(None, reward=0.0, terminated=True)
        (seconds, tokens), *rest = extra_env_info.answers
        await asyncio.sleep(seconds)
        observation: ChatMessage = {"role": "user", "content": "." * tokens}
        return StepOutcome(observation, 0.0, terminated=False, metadata={"answers": [*map(list, rest)]})

    def example_samples(self, count: int, seed: int, turns: int = 10, tool_times: float = 1.0) -> list[dict[str, Any]]:
        """Args: `tool_times` is a factor of the seconds that the tools take."""
        return [_program(random.Random(f"{seed} {number}"), turns, tool_times) for number in range(count)]


def _program(draw: random.Random, turns: int, tool_times: float) -> dict[str, Any]:
    """A prompt of random tokens, so that no two begin alike. One tool of five is slow."""
    prompt = draw.choices(range(LOWEST_ORDINARY_ID, HIGHEST_ORDINARY_ID), k=draw.randint(900, 1100))
    units = [draw.uniform(10, 60) if draw.random() < 1 / 5 else draw.uniform(1, 4) for _ in range(1, turns)]
    answers = [(tool_times * UNIT_S * each, draw.randint(150, 450)) for each in units]
    return {
        "message_log": [{"role": "user", "content": "", "token_ids": prompt}],
        "extra_env_info": {"answers": answers},
        "final_tokens": len(prompt) + turns * NEW_TOKENS + sum(tokens for _, tokens in answers),
    }
