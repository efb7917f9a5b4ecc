"""`GET /healthz`, `/readyz`, `/metrics` and `/info`: whether the service works, how it does, and what it is.

Counterpart of `/info` in the client: `rollout_client/calls/async_client/info.py`.
"""

from typing import Literal

import orjson
from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict

from rollout_client.contract.info import (
    Ready,
    ServiceInfo,
    Vocabulary,
)
from service.http.authorization import OPEN, needs
from service.http.request_body import JSON
from service.metrics.exposition import ExportersLost, all_metrics
from service.problems import not_ready
from service.routes.dependencies import Rollouts, Services

info_router = APIRouter(prefix="/info", tags=["info"])


@info_router.get("", **needs("read"), summary="Describe the service")
async def _info(rollouts: Rollouts, services: Services) -> ServiceInfo:
    """Model, tokenizer, limits, versions and tasks: what a client or a trainer has to match."""
    further = {"follow": await rollouts.policy.follow_state(), "keeps_records": services.records is not None}
    return rollouts.info().model_copy(update=further)


@info_router.get("/vocabulary", response_model=Vocabulary, **needs("read"), summary="List the tokens of the model")
async def _vocabulary(rollouts: Rollouts) -> Response:
    """The token of each id, to see which differ where `vocabulary_sha256` is not what a trainer has."""
    # A vocabulary has hundreds of thousands of tokens: orjson encodes them in milliseconds.
    return Response(orjson.dumps({"tokens": rollouts.vocabulary}), media_type=JSON)


PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
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
async def metrics() -> Response:
    """Metrics of rollouts, engines and Ray Serve on all nodes. They are up to ten seconds old."""
    try:
        exposition = await all_metrics()
    except ExportersLost as error:
        raise not_ready(str(error)) from error
    return Response(exposition.encode(), media_type=PROMETHEUS)


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
