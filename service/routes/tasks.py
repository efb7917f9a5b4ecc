"""The routes of `/tasks`: the environments, their fields, and samples of them."""

from typing import Annotated

from fastapi import APIRouter, Query

from rollout_client.contract import SampleInput
from rollout_client.task_contract import TaskInfo
from service.responses.problems import invalid_request, problem_responses, unknown_task
from service.rollout_service import RolloutService


def task_routes(rollouts: RolloutService) -> APIRouter:
    routes = APIRouter(prefix="/tasks")

    @routes.get("", response_model_exclude_unset=True)
    async def tasks() -> dict[str, list[TaskInfo]]:
        """The environments, the fields they need, and a sample of each that can be posted as it is."""
        return {"tasks": await rollouts.tasks()}

    @routes.get("/{task_name}/samples", responses=problem_responses(), response_model_exclude_unset=True)
    async def example_samples(
        task_name: str,
        count: Annotated[int, Query(ge=1, le=10_000)] = 8,
        seed: Annotated[int, Query(ge=0)] = 0,
    ) -> dict[str, list[SampleInput]]:
        """Samples of a task, ready to post; equal seeds give equal samples."""
        if task_name not in rollouts.environments:
            raise invalid_request(unknown_task("task_name", task_name, rollouts.environments))
        return {"samples": await rollouts.example_samples(task_name, count, seed)}

    return routes
