"""The routes of `/tasks`: the environments, their fields, and samples of them."""

from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import Response

from rollout_client.contract.info import TaskList, TaskSamples
from rollout_client.contract.sample_ranges import SampleRange
from service.http.authorization import needs
from service.http.openapi import refusal
from service.http.streaming import response_in_parts
from service.problems import TASK_UNKNOWN, RequestProblem, unknown_task
from service.rollout_requests.result_encoding import JSON, PART_BYTES, pieces
from service.routes.dependencies import Rollouts

SEED = "Shuffles the data, or seeds what the environment makes. Equal seeds give equal samples."
router = APIRouter(prefix="/tasks", tags=["tasks"])


@router.get("", response_model_exclude_unset=True, **needs("read"), summary="List the tasks")
async def _tasks(rollouts: Rollouts) -> TaskList:
    """Each task has a description, the fields that its samples need, and a sample that can be posted as it is."""
    return TaskList(tasks=await rollouts.task_sampler.listed())


@router.get(
    "/{task_name}/samples",
    response_model=TaskSamples,
    **needs("rollout"),
    summary="Get samples of a task",
    responses={404: refusal(["The task is not known"])},
)
async def _task_samples(
    rollouts: Rollouts,
    task_name: Annotated[str, Path(description="One of the tasks that `GET /tasks` lists.")],
    count: Annotated[int, Query(ge=1, le=10_000, description="How many samples.")] = 8,
    seed: Annotated[int | None, Query(ge=0, lt=2**63, description=SEED)] = None,
    start: Annotated[int, Query(ge=0, lt=2**53, description="Place of the first sample; see `SampleRange`.")] = 0,
    split: Annotated[str | None, Query(description="A part of the task's data, by default the first.")] = None,
) -> Response:
    """A page of the task's data, or of what its environment makes. The samples can be posted as they are.

    To play them without sending them, name their range in `samples_from` of `POST /rollout`.
    """
    if task_name not in rollouts.environments:
        raise RequestProblem(TASK_UNKNOWN, [unknown_task("task_name", task_name, rollouts.environments)])
    wanted = SampleRange(task_name=task_name, split=split, start=start, count=count, seed=seed)
    page = await rollouts.task_sampler.page(wanted, rollouts.limits.max_body_bytes)
    if len(page) <= PART_BYTES:
        return Response(bytes(page), media_type=JSON)
    return await response_in_parts(pieces(page), JSON)
