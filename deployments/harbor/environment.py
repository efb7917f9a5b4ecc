"""The task type of Harbor's tasks, for `GET /tasks` and for samples that the service makes."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from deployments.harbor.settings import HarborSettings
from deployments.harbor.tasks import load_tasks
from rollout_env import ChatMessage, SampleRejected, StepOutcome, TaskEnvironment


class HarborInfo(BaseModel):
    """Fields of a sample."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    task: str
    """Name of the task, as its `task.toml` has it, else that of its folder."""


class HarborTasks(TaskEnvironment):
    """Describes the tasks, which `HarborProgram` plays (`deployments/agents/harbor_program.py`)."""

    description = "Tasks in Harbor's format: an agent works in a sandbox, and the verifier of the task scores it."
    ExtraEnvInfo = HarborInfo

    def __init__(self, settings: dict[str, Any]) -> None:
        """Raises `HarborTaskRefused`."""
        self._tasks = list(load_tasks(HarborSettings.model_validate(settings)).values())
        self.sample_count = len(self._tasks)

    def step(self, message_log: list[ChatMessage], extra_env_info: HarborInfo) -> StepOutcome:  # noqa: ARG002
        """Is never called. Raises `SampleRejected`."""
        raise SampleRejected("This task judges no conversation: its verifier judges the sandbox at the end of the run.")

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """The tasks in order, beginning with number `seed`, and again from the first one after the last."""
        tasks = [self._tasks[number % len(self._tasks)] for number in range(seed, seed + count)]
        return [
            {
                "id": task.name,
                "messages": [{"role": "user", "content": task.instruction}],
                "extra_env_info": {"task": task.name},
            }
            for task in tasks
        ]
