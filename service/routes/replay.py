"""`POST /replay`: the tokens of a rollout generated again, and whether they are equal."""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ValidationError

from deployments.policy.failures import PolicyNotCurrent
from deployments.rollout_records.book import (
    RolloutRecordsNotConfigured,
    RolloutUnknown,
    records_not_configured,
)
from rollout_client.contract.replay import ReplayRequest, ReplayResponse
from service.http.authorization import AuthorizedCaller, needs
from service.http.openapi import json_request, limited, refusals
from service.http.request_body import JSON, read_body, refuse_other_than_json
from service.images.request_images import Source, names_of
from service.problems import validation_problem
from service.routes.dependencies import Admitted, RequestId, Services

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
    result = asked.rollout
    if result is None:
        if services.records is None:
            raise records_not_configured()
        result = (await services.records.record(str(asked.rollout_id), caller)).rollout
    recorded = await asyncio.to_thread(services.replayer.read, result)
    sources: list[Source] = [
        (shown.media, ("rollout", "message_log", place, "mm_ranges", number))
        for place, message in enumerate(result.message_log)
        for number, shown in enumerate(message.mm_ranges or ())
    ]
    await names_of(services.images, sources, caller, is_bounded=False)
    admitted.hold_call(1, "rollout", len(recorded.token_ids))
    answer = await services.replayer.replay(recorded, request_id, caller)
    return Response(answer.model_dump_json(exclude_none=True), media_type=JSON)


def _parsed(body: bytearray) -> ReplayRequest:
    """Raises `RequestProblem`: 400 or 422, its problems."""
    try:
        return ReplayRequest.model_validate_json(body)
    except ValidationError as error:
        raise validation_problem(error) from error
