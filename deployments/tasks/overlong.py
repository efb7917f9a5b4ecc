"""Penalizes long replies, as DAPO does: a part of `multi_reward` beside the task itself."""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from rollout_env import ChatMessage, StepOutcome, TaskEnvironment

Tokens = Annotated[int, Field(ge=1)]


class NoFields(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SoftOverlongEnvironment(TaskEnvironment):
    """Gives 0 for a reply that ends before the buffer, then less and less, and -1 from `max_tokens` on.

    That is the soft overlong punishment of DAPO (arXiv:2503.14476, equation 13). Its samples need no fields. It ends no
    rollout, so it is a part of `multi_reward`, behind the one that leads.
    """

    description: ClassVar[str] = "Replies that should not be long; the penalty grows over their last tokens."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = NoFields

    def __init__(self, max_tokens: Tokens, buffer_tokens: Tokens) -> None:
        """Sets the bounds of the penalty.

        Args:
            max_tokens: the length from which the reward is -1: the `max_new_tokens` of the rollouts.
            buffer_tokens: the length of the buffer before it.
        """
        if buffer_tokens > max_tokens:
            raise ValueError(f"buffer_tokens must be at most max_tokens, got {buffer_tokens} and {max_tokens}")
        self.max_tokens = max_tokens
        self.buffer_tokens = buffer_tokens

    async def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:  # noqa: ARG002
        """The reward is 0 for a reply of unknown length, which only tests and `play` have."""
        tokens = message_log[-1].get("token_count", 0)
        beyond = tokens - (self.max_tokens - self.buffer_tokens)
        reward = -min(max(beyond, 0) / self.buffer_tokens, 1.0)
        observation: ChatMessage = {"role": "user", "content": f"Environment: {tokens} tokens."}
        return StepOutcome(observation, reward, terminated=False)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [
            {"messages": [{"role": "user", "content": f"Say something short about {number}."}], "extra_env_info": {}}
            for number in range(seed, seed + count)
        ]
