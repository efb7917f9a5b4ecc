"""The contract of `/tasks`: which environments the service plays, and samples of them."""

from pydantic import JsonValue

from rollout_client.contract.rollouts import Lenient, SampleInput


class TaskInfo(Lenient):
    """One task that the service can play."""

    task_name: str
    """What a sample's `task_name` says to be played by this environment."""
    description: str
    """What the task is."""
    fields: dict[str, JsonValue]
    """JSON schema of the task's `extra_env_info`."""
    tools: list[dict[str, JsonValue]] = []  # noqa: RUF012 - pydantic copies it
    """JSON schemas of the functions that a model may call; the chat template gets them."""
    example: SampleInput
    """A sample that can be posted as it is."""
    splits: dict[str, int] = {}  # noqa: RUF012 - pydantic copies it
    """Rows of each split of the task's data; empty for a task without data, whose environment makes its samples."""


class TaskList(Lenient):
    """The answer of `GET /tasks`."""

    tasks: list[TaskInfo]
    """Every task that the service can play."""


class TaskSamples(Lenient):
    """The answer of `GET /tasks/{task_name}/samples`: a page of samples."""

    samples: list[SampleInput]
    """Samples that can be posted as they are; fewer than were asked for if they are large."""
    next_start: int
    """Where the next page begins."""
