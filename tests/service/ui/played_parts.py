"""Scripted parts that play like small models: a task of one turn, one of several turns, and one that fails at times."""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.failures import EnvironmentLost
from deployments.protocols.environments import RefusedField, StepRequest, TaskDescription
from deployments.protocols.generation import Environment, Generation, GenerationRequest, WeightSpan
from rollout_env import StepOutcome
from tests.service.scripted import ScriptedGenerator, ids_of

SENTENCES = (
    "20 and 22 are 42, so the answer is \\boxed{42}",
    "First the tens: 20 + 20 = 40.\nThen the ones: 0 + 2 = 2. So \\boxed{42}",
    "I count up from 22 and get \\boxed{41}",
    "\\boxed{42}",
)
END = 261
"""The token that ends a message, in the embedded tokenizer."""


class TalkingGenerator(ScriptedGenerator):
    """Says one of `SENTENCES`, the same for the same rollout and turn; half of its tokens have the older weights.

    The first turn is made at replica `g1`, the others at `g2`.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__(SENTENCES, delay_s=delay_s)

    async def generate(self, request: GenerationRequest) -> Generation:
        draw = random.Random(f"{request.rollout_id[-8:]}{len(request.prompt_token_ids)}{len(self.requests)}")
        self.requests.append(request)
        began_at, waited_s = time.time(), self.delay_s * draw.random()
        await asyncio.sleep(waited_s)
        await self.share_of_time(request, self.delay_s * draw.uniform(0.5, 1.5) if self.delay_s else 0)
        token_ids = [*ids_of(draw.choice(SENTENCES)), END][: request.max_new_tokens]
        logprobs = [math.log(draw.random() ** 0.3) if draw.random() < 0.3 else -0.01 for _ in token_ids]
        middle = len(token_ids) // 2
        spans = (WeightSpan("6", 0, middle), WeightSpan("7", middle, len(token_ids)))
        reason = "stop" if token_ids[-1] == END else "length"
        return Generation(
            token_ids,
            logprobs,
            reason,  # type: ignore[arg-type]
            spans,
            replica="g2" if request.turn else "g1",
            cached_tokens=len(request.prompt_token_ids) // 2,
            batch_size=4,
            began_at=began_at,
            waited_s=waited_s,
            took_s=time.time() - began_at - waited_s,
        )


@dataclass
class PlayedTask(Environment):
    """Ends a rollout after `turns` steps. An answer of 42 is right."""

    task_name: str
    description: str
    turns: int = 1
    fails: bool = False
    requests: list[StepRequest] = field(default_factory=list)

    async def step(self, request: StepRequest) -> StepOutcome:
        self.requests.append(request)
        if self.fails and len(self.requests) % 2:
            raise EnvironmentLost("The process of the environment has ended.")
        is_right, is_last = "42" in str(request.message_log[-1]["content"]), request.turn + 1 >= self.turns
        reward = float(is_right) if is_last else 0.25 * request.turn - 0.25
        content = ("Correct." if is_right else "Incorrect. Expected 42.") if is_last else "Go on."
        return StepOutcome({"role": "user", "content": content}, reward, is_last)

    async def describe(self) -> TaskDescription:
        [example] = await self.example_samples(1, 0)
        fields = {
            "type": "object",
            "properties": {"ground_truth": {"type": "string", "description": "The expected answer."}},
            "required": ["ground_truth"],
        }
        return TaskDescription(self.task_name, self.description, fields, example)

    async def refused_fields(self, extra_env_infos: Sequence[dict[str, Any]]) -> list[RefusedField]:
        return [
            RefusedField(place, ("ground_truth",), "Field required")
            for place, info in enumerate(extra_env_infos)
            if "ground_truth" not in info
        ]

    async def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [
            {
                "task_name": self.task_name,
                "messages": [{"role": "user", "content": f"What is {20 + at} + {22 + seed}?"}],
                "extra_env_info": {"ground_truth": str(42 + at + seed)},
            }
            for at in range(count)
        ]


def tasks() -> dict[str, PlayedTask]:
    return {
        task.task_name: task
        for task in (
            PlayedTask("math", "Sums of two numbers, answered in a box."),
            PlayedTask("steps", "The same in three turns.", turns=3),
            PlayedTask("shaky", "Sums whose environment fails half of the time.", fails=True),
        )
    }
