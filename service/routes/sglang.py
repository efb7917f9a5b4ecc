"""The routes beside `/generate` that trainers call which were written for SGLang's server or router."""

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from rollout_client.contract.info import Ready
from rollout_client.contract.sglang import (
    AbortRequest,
    SGLangLoad,
    SGLangLoads,
    SGLangModelInfo,
    SGLangWorker,
    SGLangWorkers,
)
from service.http.authorization import OPEN, AuthorizedCaller, needs
from service.http.openapi import json_request, refusals
from service.http.request_body import read_json_body
from service.routes.dependencies import Calls, Rollouts, Services

MOST_BYTES_OF_AN_ABORT = 2**16
_NOTHING_FLUSHED = "Nothing was flushed: scores use no prefix cache, and new weights empty it.\n"
router = APIRouter(tags=["model server"])


@router.post(
    "/abort_request",
    response_class=Response,
    **needs("rollout"),
    summary="Abort calls of SGLang's API",
    responses={200: {"description": "They have ended"}, **refusals(reads_body=True)},
    openapi_extra=json_request(AbortRequest(abort_all=True)),
)
async def _abort_request(request: Request, calls: Calls, caller: AuthorizedCaller) -> Response:
    """Ends calls of `POST /generate` with the tokens that they have; calls that wait for their turn end without any."""
    asked = await read_json_body(request, AbortRequest, MOST_BYTES_OF_AN_ABORT, "name fewer calls")
    await calls.abort(asked.rid or "", caller)
    return Response()


@router.get("/get_model_info", name="get_model_info", **needs("read"), summary="Describe the model, as SGLang did")
@router.get("/model_info", **needs("read"), summary="Describe the model, as SGLang does")
async def _model_info(rollouts: Rollouts) -> SGLangModelInfo:
    """The model and the current version of its weights."""
    name, version = rollouts.episode_factory.generator.model, rollouts.policy.version or 0
    return SGLangModelInfo(model_path=name, tokenizer_path=name, weight_version=str(version))


@router.get("/workers", **needs("read"), summary="List the workers, as SGLang's router does")
async def _workers(request: Request) -> SGLangWorkers:
    """One worker: the service, by the address at which it was reached."""
    return SGLangWorkers(workers=[SGLangWorker(url=str(request.base_url).rstrip("/"))])


@router.get("/loads", **needs("read"), summary="Count the calls in flight, as SGLang does")
async def _loads(calls: Calls, caller: AuthorizedCaller) -> SGLangLoads:
    """The calls of token ids of the caller's key."""
    return SGLangLoads(loads=[SGLangLoad(num_running_reqs=calls.token_calls_of(caller))])


@router.get(
    "/health_generate",
    name="health_generate",
    **OPEN,
    summary="Check that calls can be served, as SGLang does by generating",
)
@router.get("/health", **OPEN, summary="Check that calls can be served, as SGLang does")
async def _health(services: Services) -> Ready:
    """As `GET /readyz`."""
    return Ready(degraded=await services.readiness.check())


@router.post(
    "/flush_cache",
    response_class=PlainTextResponse,
    **needs("rollout"),
    summary="Do nothing, where SGLang flushes its cache",
)
async def _flush_cache() -> Response:
    """Trainers call it before they let prompts be scored, which uses no cache here."""
    return PlainTextResponse(_NOTHING_FLUSHED)
