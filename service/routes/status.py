"""`GET /healthz`, `/readyz`, `/metrics`, `/info` and `/tasks`: whether the service works, how, and what it plays.

Counterpart of `/info` and `/tasks` in the client: `rollout_client/calls/async_client/info.py`.
"""

from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict

from rollout_client.contract.base import FieldProblem
from rollout_client.contract.info import Ready, ServiceInfo, TaskList, TaskSamples, Vocabulary
from rollout_client.contract.selection import SampleRange
from rollout_env.certify import PanelSettings
from rollout_env.worth import NotCertified
from service.http.openapi import OPEN, json_request, needs, refusal
from service.http.request_body import read_json_body
from service.http.streaming import response_in_parts
from service.metrics.ingress_metrics import ExportersLost, all_metrics
from service.problems import TASK_UNKNOWN, RequestProblem, invalid_request, not_ready, unknown_task
from service.rollout_requests.result_encoding import JSON, PART_BYTES, pieces
from service.rollout_requests.service_status import service_info
from service.routes.dependencies import Rollouts, Services

info_router = APIRouter(prefix="/info", tags=["info"])


@info_router.get("", **needs("read"), summary="Describe the service")
async def _info(rollouts: Rollouts, services: Services) -> ServiceInfo:
    """Model, tokenizer, limits, versions and tasks: what a client or a trainer has to match."""
    further = {"follow": await rollouts.policy.follow_state(), "keeps_records": services.records is not None}
    return service_info(rollouts).model_copy(update=further)


@info_router.get("/vocabulary", response_model=Vocabulary, **needs("read"), summary="List the tokens of the model")
async def _vocabulary(rollouts: Rollouts) -> Response:
    """The token of each id, to see which differ where `vocabulary_sha256` is not what a trainer has."""
    # A vocabulary has hundreds of thousands of tokens: orjson encodes them in milliseconds.
    return Response(orjson.dumps({"tokens": rollouts.episode_factory.tokenizer.vocabulary}), media_type=JSON)


_SEED = "Shuffles the data, or seeds what the environment makes. Equal seeds give equal samples."
tasks_router = APIRouter(prefix="/tasks", tags=["tasks"])


@tasks_router.get("", response_model_exclude_unset=True, **needs("read"), summary="List the tasks")
async def _tasks(rollouts: Rollouts) -> TaskList:
    """Each task has a description, the fields that its samples need, and a sample that can be posted as it is."""
    return TaskList(tasks=await rollouts.task_sampler.listed())


@tasks_router.get(
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
    seed: Annotated[int | None, Query(ge=0, lt=2**63, description=_SEED)] = None,
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


@tasks_router.post(
    "/{task_name}/certify",
    **needs("policy"),
    summary="Certify a task",
    responses={404: refusal(["The task is not known"])},
    openapi_extra=json_request(PanelSettings()),
)
async def _certify_task(
    rollouts: Rollouts,
    task_name: Annotated[str, Path(description="One of the tasks that `GET /tasks` lists.")],
    request: Request,
) -> dict[str, Any]:
    """Plays the task without a model, as `rollout env certify` does, in minutes; answers with its certificate."""
    if task_name not in rollouts.environments:
        raise RequestProblem(TASK_UNKNOWN, [unknown_task("task_name", task_name, rollouts.environments)])
    settings = await read_json_body(request, PanelSettings, 2**20, "send {} for the panel's own settings")
    try:
        return await rollouts.environments[task_name].certify(settings)
    except NotCertified as error:
        raise invalid_request(FieldProblem(field="task_name", message=str(error), value=task_name)) from error


_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
metrics_router = APIRouter(tags=["health"])


@metrics_router.get(
    "/metrics",
    response_class=PlainTextResponse,
    **needs("read"),
    summary="Get the metrics of all replicas",
    responses={
        200: {"description": "In Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}},
    },
)
async def _metrics() -> Response:
    """Metrics of rollouts, engines and Ray Serve on all nodes. They are up to ten seconds old."""
    try:
        exposition = await all_metrics()
    except ExportersLost as error:
        raise not_ready(str(error)) from error
    return Response(exposition.encode(), media_type=_PROMETHEUS)


router = APIRouter(tags=["health"])


class Alive(BaseModel):
    """The process answers."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    status: Literal["alive"] = "alive"
    """Always `alive`."""


@router.get("/healthz", **OPEN, summary="Check that the process is alive")
async def _healthz() -> Alive:
    """Answers while the process runs. Needs no other deployment."""
    return Alive()


@router.get("/readyz", **OPEN, summary="Check that rollouts can be served")
async def _readyz(services: Services) -> Ready:
    """Checks every replica of the generator and of the environments. 503, with the reason, if no rollout would work."""
    return Ready(degraded=await services.readiness.check())
