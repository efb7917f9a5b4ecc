"""`GET /healthz`, `/readyz`, `/metrics` and `/info`: whether the service works, how it does, and what it is.

Counterpart of `/info` in the client: `rollout_client/calls/async_client/info.py`.
"""

from typing import Literal

import orjson
from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict

from rollout_client.contract.info import (
    DegradedPart,
    EncodedText,
    ModelInfo,
    Ready,
    ServiceInfo,
    ServiceVersions,
    TokenizerInfo,
    Vocabulary,
)
from rollout_client.version import CONTRACT_VERSION
from service.http.authorization import OPEN, needs
from service.http.examples import CHECKSUM
from service.http.openapi import json_response, refusals
from service.http.request_body import JSON
from service.metrics.exposition import ExportersLost, all_metrics
from service.problems import not_ready
from service.routes.dependencies import Rollouts, Services

INFO = ServiceInfo(
    model=ModelInfo(name="org/model", revision="4e20de362430cd3b72f3", vocab_size=151_936, max_model_len=32_768),
    tokenizer=TokenizerInfo(
        vocabulary_sha256=CHECKSUM,
        vocabulary_size=151_669,
        encodings=[EncodedText(text="1 + 1", token_ids=[16, 488, 220, 16])],
        chat_template_sha256=CHECKSUM,
        rendered_chat="<|im_start|>user\nQuestion<|im_end|>\n<|im_start|>assistant\n",
    ),
    limits={"max_seq_len": 32_768, "max_rollouts_per_request": 65_536},
    versions=ServiceVersions(
        service="0.1.0", contract=CONTRACT_VERSION, engine="vllm 0.32.0", ray="2.60.0", transformers="5.19.0"
    ),
    policy_version=7,
    tasks=["math"],
)
READY = Ready(
    status="ready",
    degraded=[
        DegradedPart(
            part="environment",
            task_name="code",
            reason="The answer of the environment 'code' took longer than 5 s.",
        )
    ],
)
info_router = APIRouter(prefix="/info", tags=["info"])


@info_router.get(
    "", **needs("read"), summary="Describe the service", responses={200: json_response(INFO), **refusals()}
)
async def info(rollouts: Rollouts, services: Services) -> ServiceInfo:
    """Model, tokenizer, limits, versions and tasks: what a client or a trainer has to match."""
    further = {"follow": await rollouts.policy.follow_state(), "keeps_records": services.records is not None}
    return rollouts.info().model_copy(update=further)


@info_router.get(
    "/vocabulary",
    response_model=Vocabulary,
    **needs("read"),
    summary="List the tokens of the model",
    responses={200: json_response(Vocabulary(tokens=["!", '"', None])), **refusals()},
)
async def vocabulary(rollouts: Rollouts) -> Response:
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
        **refusals(),
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


@router.get("/healthz", **OPEN, summary="Check that the process is alive", responses=refusals())
async def healthz() -> Alive:
    """Answers while the process runs. Needs no other deployment."""
    return Alive()


@router.get(
    "/readyz", **OPEN, summary="Check that rollouts can be served", responses={200: json_response(READY), **refusals()}
)
async def readyz(services: Services) -> Ready:
    """Checks every replica of the generator and of the environments. 503, with the reason, if no rollout would work."""
    return Ready(degraded=await services.readiness.check())
