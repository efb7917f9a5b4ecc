"""Conversations that a reward model of the service scores."""

import math
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from deployments.tasks.llm_judge import ModelMissing, open_questions
from deployments.tasks.replies import text_outcome
from rollout_env import ChatMessage, ChatModel, RewardModel, StepOutcome, TaskEnvironment


class _RewardModelInfo(BaseModel):
    """The `extra_env_info` of a sample: a reward model needs nothing but the conversation."""

    model_config = ConfigDict(extra="ignore")


class RewardModelEnvironment(TaskEnvironment):
    """One turn, whose reward `score` is that of the reward model for the conversation with the reply."""

    description: ClassVar[str] = "Conversations that a reward model scores."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = _RewardModelInfo

    def __init__(self, model: str | None = None, scaling: Literal["none", "sigmoid"] = "none") -> None:
        """Keeps how scores become rewards.

        Args:
            model: the name of the reward model; by default the one that the entry in the config names.
            scaling: `sigmoid` brings scores between 0 and 1.
        """
        self.model, self.scaling = model, scaling

    async def step(self, message_log: list[ChatMessage], extra_env_info: _RewardModelInfo) -> StepOutcome:  # noqa: ARG002
        """Asks the reward model. Raises what it raises."""
        started = time.monotonic()
        assert self.model is not None
        score = await self.reward_models[self.model].score(message_log)
        return text_outcome(
            "Environment: the conversation was scored.",
            {"score": _sigmoid(score) if self.scaling == "sigmoid" else score},
            terminated=True,
            metrics={"reward_model_seconds": time.monotonic() - started},
        )

    def use_models(self, chat_models: Mapping[str, ChatModel], reward_models: Mapping[str, RewardModel]) -> None:
        """Raises `ModelMissing` if the reward model is not among them, or not the only one and has no name."""
        super().use_models(chat_models, reward_models)
        if self.model is None and len(reward_models) == 1:
            [self.model] = reward_models
        if self.model is None or self.model not in reward_models:
            named = "one name" if self.model is None else repr(self.model)
            raise ModelMissing(f"the entry of the environment in the config needs {named} under reward_models")

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Open questions."""
        return open_questions(count, seed)


def _sigmoid(score: float) -> float:
    """Without overflow for any score."""
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
