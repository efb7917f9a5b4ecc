"""The environment of a task whose agent brings everything: it takes any sample, and judges nothing."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from rollout_env import ChatMessage, SampleRejected, StepOutcome, TaskEnvironment


class AnyInfo(BaseModel):
    """Whatever the agent needs to know."""

    model_config = ConfigDict(extra="allow")


class PlainAgentTask(TaskEnvironment):
    """Describes the task for `GET /tasks`. Its samples come from the task's `data`, or from whoever posts them."""

    description = "Played by an agent, which says what its rollouts are worth."
    ExtraEnvInfo = AnyInfo

    def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:  # noqa: ARG002
        """Is never called. Raises `SampleRejected`."""
        raise SampleRejected("This task judges nothing: its agent gives the reward.")

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        numbers = range(seed, seed + count)
        return [
            {"messages": [{"role": "user", "content": f"Question {number}"}], "extra_env_info": {}}
            for number in numbers
        ]
