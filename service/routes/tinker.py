"""The routes of Tinker's sampling API, as the client `tinker` calls them: `asample`, futures, and its handshake.

They are below `/api/v1`, and not in the OpenAPI document: their types are those of Tinker's client. A call starts work
whose answer the client asks for later. Sessions and samplers are no state: their ids say all that is known of them.

The client sends a call again after 408, 409, 429 and every 5xx, so what cannot succeed is refused with another status;
it asks for an answer again after 408, and makes the call anew after 410.
"""

import asyncio
from contextlib import ExitStack
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from deployments.failures import StoreFailure
from deployments.protocols.model_server import public_model_name
from rollout_client.contract.base import Lenient
from rollout_client.contract.problems import FieldProblem
from service.http.authorization import OPEN, AuthorizedCaller, needs
from service.http.request_body import read_body, read_json_body, refuse_other_than_json
from service.model_server.call_bodies import MOST_BYTES_INLINE
from service.model_server.futures import FutureElsewhere
from service.model_server.tinker_dialect import (
    SampleCall,
    Sampler,
    SamplingSessionRequest,
    new_session,
    parsed_sample_call,
)
from service.problems import NOT_TRAINED_HERE, RequestProblem, invalid_request
from service.rollout_requests.service_status import service_info
from service.routes.dependencies import RequestId, Rollouts, Services, TinkerCalls, held_request
from service.routes.model_server import SHORTEN

POLL_S = 30.0
"""The client waits 45 s for the answer to a poll."""
ELSEWHERE_S = 0.1
"""Until the client asks again, and maybe reaches the ingress replica that has its answer."""
POLICY_WAIT_S = 30.0
"""For weights that are not current yet; the client waits 60 s for a sampler."""
MOST_BYTES = 2**16
ADVICE = "send less"
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
}
"""Features that the client asks for at its start: none is needed here."""
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}
router = APIRouter(prefix="/api/v1", tags=["tinker"], include_in_schema=False)
rollout_scope: dict[str, Any] = needs("rollout", also_api_key=True)


class _ClientSession(Lenient):
    """The body of `create_session`, as far as it means something here."""

    user_metadata: dict[str, Any] | None = None


class _NamedFuture(Lenient):
    """The body of `retrieve_future` and of `cancel_future`."""

    request_id: str


@router.get("/healthz", **OPEN)
async def _health_check() -> Response:
    return JSONResponse({"status": "ok"})


@router.post("/client/config", **rollout_scope)
async def _client_config() -> Response:
    return JSONResponse(CLIENT_CONFIG)


@router.post("/client/dynamic_config", **rollout_scope)
async def _client_dynamic_config() -> Response:
    return JSONResponse(DYNAMIC_CONFIG)


@router.post("/telemetry", **rollout_scope)
async def _telemetry() -> Response:
    """Keeps nothing of it."""
    return JSONResponse({"status": "accepted"})


@router.get("/get_server_capabilities", **needs("read", also_api_key=True))
async def _get_server_capabilities(rollouts: Rollouts) -> Response:
    model = service_info(rollouts).model
    supported = {"model_name": model.name, "max_context_length": model.max_model_len}
    return JSONResponse({"supported_models": [{**supported, "trainable": False, "sampleable": True}]})


@router.post("/create_session", **rollout_scope)
async def _create_session(request: Request) -> Response:
    asked = await read_json_body(request, _ClientSession, MOST_BYTES, ADVICE)
    return JSONResponse({"type": "create_session", "session_id": new_session(asked.user_metadata)})


@router.post("/session_heartbeat", **rollout_scope)
async def _session_heartbeat() -> Response:
    return JSONResponse({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish", **rollout_scope)
async def _finish_session(session_id: str) -> Response:
    return JSONResponse({"session_id": session_id})


@router.post("/create_sampling_session", **rollout_scope)
async def _create_sampling_session(request: Request, rollouts: Rollouts, _: TinkerCalls) -> Response:
    """Waits until the weights that it names are current."""
    asked = await read_json_body(request, SamplingSessionRequest, MOST_BYTES, ADVICE)
    sampler = asked.sampler
    model = service_info(rollouts).model.name
    if asked.base_model is not None and public_model_name(asked.base_model) != model:
        message = f"this service samples from {model} alone; name that"
        raise invalid_request(FieldProblem(field="base_model", message=message, value=asked.base_model))
    try:
        await rollouts.policy.wait_for_version(sampler.demand.model_copy(update={"wait_s": POLICY_WAIT_S}))
    except StoreFailure as failure:
        # The status of the failure would let the client ask again.
        raise invalid_request(*failure.problems) from failure
    return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler.id})


@router.get("/samplers/{sampler_id}", **rollout_scope)
async def _get_sampler(sampler_id: str, rollouts: Rollouts) -> Response:
    sampler = Sampler.of_id(sampler_id)
    fields = {
        "sampler_id": sampler.id,
        "base_model": service_info(rollouts).model.name,
        "model_path": sampler.model_path,
    }
    return JSONResponse(fields)


@router.post("/asample", **rollout_scope)
async def _asample(
    request: Request,
    rollouts: Rollouts,
    services: Services,
    tinker: TinkerCalls,
    request_id: RequestId,
    caller: AuthorizedCaller,
) -> Response:
    """Starts the samples of one prompt. What the call holds in flight, it holds until they are there."""
    with ExitStack() as stack:
        admitted = stack.enter_context(held_request(request, caller))
        refuse_other_than_json(request.headers)
        most_bytes = min(rollouts.limits.max_body_bytes, rollouts.limits.max_sample_bytes)
        body = await read_body(request, most_bytes, SHORTEN, admitted.hold_body)
        parse = partial(parsed_sample_call, body, services.scoring.bounds)
        call: SampleCall = parse() if len(body) <= MOST_BYTES_INLINE else await asyncio.to_thread(parse)
        admitted.hold_call(call.asked.num_samples, "num_samples", call.most_tokens)
        held = stack.pop_all()
    future_id = tinker.futures.start(
        caller.namespace, call.name, lambda: tinker.answer(call, request_id, caller), held.close
    )
    sequence_ids = [f"{future_id}/{place}" for place in range(call.asked.num_samples)]
    return JSONResponse({"request_id": future_id, "sample_sequence_ids": sequence_ids})


@router.post("/retrieve_future", **rollout_scope)
async def _retrieve_future(request: Request, tinker: TinkerCalls, caller: AuthorizedCaller) -> Response:
    asked = await read_json_body(request, _NamedFuture, MOST_BYTES, ADVICE)
    headers = dict[str, str]()
    try:
        answer = await tinker.futures.answer(caller.namespace, asked.request_id, POLL_S)
    except FutureElsewhere:
        await asyncio.sleep(ELSEWHERE_S)
        # On a connection of its own the next poll can reach another replica.
        answer, headers = None, {"Connection": "close"}
    if answer is None:
        pending = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
        return JSONResponse(pending, 408, headers)
    return Response(answer.body, media_type=answer.media_type)


@router.post("/cancel_future", **rollout_scope)
async def _cancel_future(request: Request, tinker: TinkerCalls, caller: AuthorizedCaller) -> Response:
    asked = await read_json_body(request, _NamedFuture, MOST_BYTES, ADVICE)
    tinker.futures.cancel(caller.namespace, asked.request_id)
    return JSONResponse({})


@router.api_route("/{call:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"], **rollout_scope)
async def _not_here(call: str) -> Response:
    """Every other call of Tinker's client."""
    message = (
        f"{call} is not here: this service samples and does not train. A trainer pushes its weights by PUT "
        "/policy/versions/VERSION, and samples from them here"
    )
    raise RequestProblem(NOT_TRAINED_HERE, [FieldProblem(field="", message=message)])
