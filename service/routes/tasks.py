"""The routes of `/tasks`: the environments, their fields, and samples of them."""

from typing import Annotated

from fastapi import APIRouter, Query

from rollout_client.task_contract import ExampleSamples, TaskList
from service.responses.problems import task_not_found
from service.routes.dependencies import Rollouts

router = APIRouter(prefix="/tasks", tags=["tasks"])


@router.get("", response_model_exclude_unset=True)
async def tasks(rollouts: Rollouts) -> TaskList:
    """Lists the tasks: what each is, the fields that it needs, and a sample that can be posted as it is."""
    return TaskList(tasks=await rollouts.tasks())


@router.get("/{task_name}/samples", response_model_exclude_unset=True)
async def example_samples(
    rollouts: Rollouts,
    task_name: str,
    count: Annotated[int, Query(ge=1, le=10_000)] = 8,
    seed: Annotated[int, Query(ge=0)] = 0,
) -> ExampleSamples:
    """Makes samples of a task, ready to post; equal seeds give equal samples."""
    if task_name not in rollouts.environments:
        raise task_not_found(task_name, rollouts.environments)
    return ExampleSamples(samples=await rollouts.example_samples(task_name, count, seed))
