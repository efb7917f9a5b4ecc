"""`POST /replay`: the tokens of a rollout generated again, and whether they are equal."""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ValidationError

from deployments.policy.failures import PolicyNotCurrent
from deployments.rollout_records.failures import (
    RolloutRecordsNotConfigured,
    RolloutUnknown,
    records_not_configured,
)
from rollout_client.contract.replay import ReplayRequest, ReplayResponse
from rollout_client.contract.rollouts import SampleResult
from service.access.keys import Caller
from service.http.authorization import AuthorizedCaller, needs
from service.http.openapi import json_request, limited, refusals
from service.http.request_body import JSON, read_body, refuse_other_than_json
from service.images.request_images import Source, none_taken
from service.problems import validation_problem
from service.routes.dependencies import Admitted, RequestId, Services
from service.services import AppServices

router = APIRouter(tags=["rollouts"])


@router.post(
    "/replay",
    response_model=ReplayResponse,
    **needs("rollout"),
    summary="Generate a rollout again",
    responses={
        429: limited(),
        **refusals(PolicyNotCurrent, RolloutUnknown, RolloutRecordsNotConfigured, reads_body=True),
    },
    openapi_extra=json_request(ReplayRequest(rollout_id="step-7-a1b2c3d4e5f60718-0-0")),
)
async def _replay(
    request: Request, services: Services, admitted: Admitted, request_id: RequestId, caller: AuthorizedCaller
) -> Response:
    """Makes each generation of a rollout again: with the recorded tokens before it, its seed and stop strings, under
    the same weights, on the replica that generated then if it runs.

    The verdict says whether the tokens and their log-probabilities are equal, or where they part.
    """
    refuse_other_than_json(request.headers)
    limits = services.rollouts.limits
    body = await read_body(request, limits.max_body_bytes, "send the result alone", admitted.hold_body)
    asked = await asyncio.to_thread(_parsed, body)
    del body
    result = await _recorded_result(asked, services, caller)
    recorded = await asyncio.to_thread(services.replayer.read, result)
    await _refuse_unknown_images(result, services, caller)
    admitted.hold_call(1, "rollout", len(recorded.token_ids))
    answer = await services.replayer.replay(recorded, request_id, caller)
    return Response(answer.model_dump_json(exclude_none=True), media_type=JSON)


def _parsed(body: bytearray) -> ReplayRequest:
    """Raises `RequestProblem`: 400 or 422, its problems."""
    try:
        return ReplayRequest.model_validate_json(body)
    except ValidationError as error:
        raise validation_problem(error) from error


async def _refuse_unknown_images(result: SampleResult, services: AppServices, caller: Caller) -> None:
    """Raises `RequestProblem` (422) if the log shows images that the caller does not have here."""
    sources: list[Source] = [
        (shown.media, ("rollout", "message_log", place, "mm_ranges", number))
        for place, message in enumerate(result.message_log)
        for number, shown in enumerate(message.mm_ranges or ())
    ]
    if sources and services.images is None:
        raise none_taken(sources)
    if services.images is not None:
        await services.images.names_of(sources, caller)


async def _recorded_result(asked: ReplayRequest, services: AppServices, caller: Caller) -> SampleResult:
    """Raises `RolloutRecordsNotConfigured`, `RolloutUnknown`, `StoreLost`."""
    if asked.rollout is not None:
        return asked.rollout
    if services.records is None:
        raise records_not_configured()
    return (await services.records.record(str(asked.rollout_id), caller)).rollout
