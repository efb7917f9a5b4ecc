"""`GET /healthz`, `/readyz`, `/metrics` and `/info`: whether the service works, how it does, and what it is.

Counterpart of `/info` in the client: `rollout_client/calls/async_client/info.py`.
"""

from typing import Literal

import orjson
from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict

from rollout_client.contract.info import Ready, ServiceInfo, Vocabulary
from service.http.authorization import OPEN, needs
from service.http.request_body import JSON
from service.metrics.exposition import ExportersLost, all_metrics
from service.problems import not_ready
from service.routes import descriptions
from service.routes.dependencies import Rollouts

info_router = APIRouter(prefix="/info", tags=["info"])


@info_router.get("", **needs("read"), **descriptions.INFO)
async def info(rollouts: Rollouts) -> ServiceInfo:
    """Model, tokenizer, limits, versions and tasks: what a client or a trainer has to match."""
    return rollouts.info()


@info_router.get("/vocabulary", response_model=Vocabulary, **needs("read"), **descriptions.VOCABULARY)
async def vocabulary(rollouts: Rollouts) -> Response:
    """The token of each id, to see which differ where `vocabulary_sha256` is not what a trainer has."""
    # A vocabulary has hundreds of thousands of tokens: orjson encodes them in milliseconds.
    return Response(orjson.dumps({"tokens": rollouts.vocabulary}), media_type=JSON)


PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
metrics_router = APIRouter(tags=["health"])


@metrics_router.get("/metrics", response_class=PlainTextResponse, **needs("read"), **descriptions.METRICS)
async def metrics() -> Response:
    """Of rollouts, engines and Ray Serve, whichever replica answers. They are up to ten seconds old."""
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


@router.get("/healthz", **OPEN, **descriptions.HEALTHZ)
async def healthz() -> Alive:
    """Answers as long as the process does. Needs no other deployment."""
    return Alive()


@router.get("/readyz", **OPEN, **descriptions.READYZ)
async def readyz(rollouts: Rollouts) -> Ready:
    """Asks every replica of the generator and of the environments. 503 if no rollout would work; it says why."""
    return Ready(degraded=await rollouts.readiness.check())
