"""How much of a reference solution a reply has in common with it, by words."""

import random
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from deployments.tasks.code import function_sample
from deployments.tasks.replies import text_outcome
from rollout_env import ChatMessage, StepOutcome, TaskEnvironment


class ReferenceInfo(BaseModel):
    """The `extra_env_info` of a sample; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    ground_truth: str
    """The reference solution."""


class CodeJaccardEnvironment(TaskEnvironment):
    """One turn. The reward is from 0 to 1 and runs nothing: the same as NeMo-RL's environment of this name gives."""

    description: ClassVar[str] = "Code whose words should be those of a reference solution; reward by their overlap."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = ReferenceInfo

    async def step(self, message_log: list[ChatMessage], extra_env_info: ReferenceInfo) -> StepOutcome:
        """Compares the whole reply with the reference."""
        reply = message_log[-1]["content"]
        score = similarity(reply, extra_env_info.ground_truth)
        verdict = "aligned" if score > 0.5 else "misaligned"
        text = f"Environment: jaccard {verdict} (score: {score:.2f})"
        return text_outcome(text, score, terminated=True, answer=reply.strip())

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Functions of one number to write, all different."""
        draw = random.Random(seed)
        largest = max(99, count)
        return [reference_sample(*divmod(number, largest)) for number in draw.sample(range(largest**2), count)]


def reference_sample(factor: int, summand: int) -> dict[str, Any]:
    sample = function_sample(factor, summand)
    return {**sample, "extra_env_info": {"ground_truth": f"def f(x):\n    return {factor} * x + {summand}"}}


def similarity(reply: str, reference: str) -> float:
    """The Jaccard index of the words in lower case, times the ratio of the shorter to the longer text; 1 if equal."""
    left, right = reply.strip().lower(), reference.strip().lower()
    if left == right:
        return 1.0
    words, reference_words = set(left.split()), set(right.split())
    if not reference_words:
        return 0.0
    overlap = len(words & reference_words) / len(words | reference_words)
    return overlap * min(len(left), len(right)) / max(len(left), len(right))
