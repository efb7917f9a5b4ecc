"""What a task is made of. A new environment is one file: subclass `TaskEnvironment`, name it in the config."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from pydantic import BaseModel

from deployments.protocols import ChatMessage, StepOutcome


class TaskEnvironment(ABC):
    """A task: how a response is judged and what comes back.

    Instances are shared by all samples of the task and keep no state of a sample: what an episode needs to go on
    travels in `extra_env_info` and comes back as the outcome's `metadata`. Any replica can therefore take any turn.
    """

    description: ClassVar[str]
    """One sentence for `/tasks`."""

    ExtraEnvInfo: ClassVar[type[BaseModel]]
    """The fields of `extra_env_info`, validated before each step."""

    @abstractmethod
    async def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:
        """Judges the last message of `message_log`, the model's response.

        Args:
            message_log: the conversation so far, `role` and `content` only; special tokens are left out.
            extra_env_info: an instance of `ExtraEnvInfo`.

        Returns:
            an observation whose role the model's chat template knows, finite rewards, and state that is JSON.

        Raises:
            EnvironmentRejected: when `extra_env_info` is well-formed but no state of this task. Whatever else is raised
                becomes an `EnvironmentBroken` of this sample, which is not tried again.
        """

    @abstractmethod
    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Makes `count` different samples (`messages`, `extra_env_info`), the same for the same `seed`."""

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Gives back what the environment holds; called once, when its replica ends."""
