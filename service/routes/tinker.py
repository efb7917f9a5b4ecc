"""The routes of Tinker's sampling API, as the client `tinker` calls them: `asample`, futures, and its handshake.

They are below `/api/v1`, and not in the OpenAPI document: their types are those of Tinker's client. A call starts work
whose answer the client asks for later. Sessions and samplers are no state: their ids say all that is known of them.

The client sends a call again after 408, 409, 429 and every 5xx, so what cannot succeed is refused with another status;
it asks for an answer again after 408, and makes the call anew after 410.
"""

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from deployments.failures import StoreFailure
from deployments.protocols.model_server import public_model_name
from rollout_client.contract.base import FieldProblem, Lenient
from service.http.openapi import OPEN, AuthorizedCaller, needs
from service.http.request_body import read_body, read_json_body, refuse_other_than_json
from service.model_server.call_bodies import MOST_BYTES_INLINE
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

_POLL_S = 30.0
"""The client waits 45 s for the answer to a poll."""
_POLICY_WAIT_S = 30.0
"""For weights that are not current yet; the client waits 60 s for a sampler."""
_MOST_BYTES = 2**16
_ADVICE = "send less"
_NOT_NEEDED = (
    "pjwt_auth_enabled",
    "sample_use_retrieve_futures",
    "sample_join_sampling_session",
    "custom_loss_server_side",
)
"""Features that the client asks for at its start."""
_HANDSHAKE: Mapping[str, Any] = {
    "/client/config": dict.fromkeys(_NOT_NEEDED, False),
    "/client/dynamic_config": {"sample_cancel_enabled": True},
    "/telemetry": {"status": "accepted"},
    "/session_heartbeat": {"type": "session_heartbeat"},
}
router = APIRouter(prefix="/api/v1", tags=["tinker"], include_in_schema=False)
_rollout_scope: dict[str, Any] = needs("rollout", also_api_key=True)


class _ClientSession(Lenient):
    """The body of `create_session`, as far as it means something here."""

    user_metadata: dict[str, Any] | None = None


class _NamedFuture(Lenient):
    """The body of `retrieve_future` and of `cancel_future`."""

    request_id: str


@router.get("/healthz", **OPEN)
async def _health_check() -> Response:
    return JSONResponse({"status": "ok"})


@router.get("/get_server_capabilities", **needs("read", also_api_key=True))
async def _get_server_capabilities(rollouts: Rollouts) -> Response:
    model = service_info(rollouts).model
    supported = {"model_name": model.name, "max_context_length": model.max_model_len}
    return JSONResponse({"supported_models": [{**supported, "trainable": False, "sampleable": True}]})


@router.post("/create_session", **_rollout_scope)
async def _create_session(request: Request) -> Response:
    asked = await read_json_body(request, _ClientSession, _MOST_BYTES, _ADVICE)
    return JSONResponse({"type": "create_session", "session_id": new_session(asked.user_metadata)})


@router.post("/client/config", **_rollout_scope)
@router.post("/client/dynamic_config", **_rollout_scope)
@router.post("/telemetry", **_rollout_scope)
@router.post("/session_heartbeat", **_rollout_scope)
async def _handshake(request: Request) -> Response:
    """Keeps nothing of what the client reports."""
    return JSONResponse(_HANDSHAKE[request.url.path.rpartition(router.prefix)[2]])


@router.post("/sessions/{session_id}/finish", **_rollout_scope)
async def _finish_session(session_id: str) -> Response:
    return JSONResponse({"session_id": session_id})


@router.post("/create_sampling_session", **_rollout_scope)
async def _create_sampling_session(request: Request, rollouts: Rollouts, _: TinkerCalls) -> Response:
    """Waits until the weights that it names are current."""
    asked = await read_json_body(request, SamplingSessionRequest, _MOST_BYTES, _ADVICE)
    sampler = asked.sampler
    model = service_info(rollouts).model.name
    if asked.base_model is not None and public_model_name(asked.base_model) != model:
        message = f"this service samples from {model} alone; name that"
        raise invalid_request(FieldProblem(field="base_model", message=message, value=asked.base_model))
    try:
        await rollouts.policy.wait_for_version(sampler.demand.model_copy(update={"wait_s": _POLICY_WAIT_S}))
    except StoreFailure as failure:
        # The status of the failure would let the client ask again.
        raise invalid_request(*failure.problems) from failure
    return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler.id})


@router.get("/samplers/{sampler_id}", **_rollout_scope)
async def _get_sampler(sampler_id: str, rollouts: Rollouts) -> Response:
    sampler = Sampler.of_id(sampler_id)
    model = service_info(rollouts).model.name
    return JSONResponse({"sampler_id": sampler.id, "base_model": model, "model_path": sampler.model_path})


@router.post("/asample", **_rollout_scope)
async def _asample(
    request: Request, services: Services, tinker: TinkerCalls, request_id: RequestId, caller: AuthorizedCaller
) -> Response:
    """Starts the samples of one prompt. What the call holds in flight, it holds until they are there."""
    with ExitStack() as stack:
        admitted = stack.enter_context(held_request(request, caller))
        refuse_other_than_json(request.headers)
        limits = services.rollouts.limits
        most_bytes = min(limits.max_body_bytes, limits.max_sample_bytes)
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


@router.post("/retrieve_future", **_rollout_scope)
async def _retrieve_future(request: Request, tinker: TinkerCalls, caller: AuthorizedCaller) -> Response:
    asked = await read_json_body(request, _NamedFuture, _MOST_BYTES, _ADVICE)
    answer = await tinker.futures.answer(caller.namespace, asked.request_id, _POLL_S)
    if answer is None:
        pending = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
        # On a connection of its own the next poll can reach another replica, if that has the answer.
        return JSONResponse(pending, 408, {"Connection": "close"})
    return Response(answer.body, media_type=answer.media_type)


@router.post("/cancel_future", **_rollout_scope)
async def _cancel_future(request: Request, tinker: TinkerCalls, caller: AuthorizedCaller) -> Response:
    asked = await read_json_body(request, _NamedFuture, _MOST_BYTES, _ADVICE)
    tinker.futures.cancel(caller.namespace, asked.request_id)
    return JSONResponse({})


@router.api_route("/{call:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"], **_rollout_scope)
async def _not_here(call: str) -> Response:
    """Every other call of Tinker's client."""
    message = (
        f"{call} is not here: this service samples and does not train. A trainer pushes its weights by PUT "
        "/policy/versions/VERSION, and samples from them here"
    )
    raise RequestProblem(NOT_TRAINED_HERE, [FieldProblem(field="", message=message)])
