"""The routes of `/tasks`: the environments, their fields, and samples of them."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from rollout_client.task_contract import ExampleSamples, TaskList
from service.responses.problems import task_not_found
from service.routes import descriptions
from service.routes.dependencies import Rollouts

router = APIRouter(prefix="/tasks", tags=["tasks"])


@router.get("", response_model_exclude_unset=True, **descriptions.TASKS)
async def tasks(rollouts: Rollouts) -> TaskList:
    """Each task has a description, the fields that its samples need, and a sample that can be posted as it is."""
    return TaskList(tasks=await rollouts.tasks())


@router.get("/{task_name}/samples", response_model_exclude_unset=True, **descriptions.EXAMPLE_SAMPLES)
async def example_samples(
    rollouts: Rollouts,
    task_name: Annotated[str, Path(description="One of the tasks that `GET /tasks` lists.")],
    count: Annotated[int, Query(ge=1, le=10_000, description="How many samples.")] = 8,
    seed: Annotated[int, Query(ge=0, description="Equal seeds give equal samples.")] = 0,
) -> ExampleSamples:
    """The samples can be posted as they are."""
    if task_name not in rollouts.environments:
        raise task_not_found(task_name, rollouts.environments)
    return ExampleSamples(samples=await rollouts.example_samples(task_name, count, seed))
