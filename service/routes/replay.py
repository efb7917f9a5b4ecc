"""`POST /replay`: the tokens of a rollout generated again, and whether they are equal."""

import asyncio
import time

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ValidationError

from deployments.policy.failures import PolicyNotCurrent
from deployments.rollout_records.failures import (
    RolloutRecordsNotConfigured,
    RolloutUnknown,
    records_not_configured,
)
from rollout_client.contract.origins import GenerationOrigin, ReplayRecord
from rollout_client.contract.replay import ReplayedGeneration, ReplayRequest, ReplayResponse, TokenDifference
from rollout_client.contract.rollout_records import RecordedReplay
from rollout_client.contract.rollouts import SampleResult
from service.access.keys import Caller
from service.http.authorization import AuthorizedCaller, needs
from service.http.examples import REQUEST_ID, RESULT
from service.http.openapi import json_request, json_response, limited, refusals
from service.http.request_body import JSON, read_body, refuse_other_than_json
from service.images.request_images import Source, none_taken
from service.problems import validation_problem
from service.routes.dependencies import Admitted, RequestId, Services
from service.services import AppServices

RECORDED = RESULT.model_copy(
    update={
        "rollout_id": "step-7-a1b2c3d4e5f60718-0-0",
        "replay": ReplayRecord(
            seed=7,
            max_seq_len=4096,
            generations=[GenerationOrigin(message=1, start=0, end=3, replica="k2x9q1")],
        ),
    }
)
DIFFERENCE = TokenDifference(
    message=1,
    token=1,
    recorded_id=9,
    recorded_text="boxed",
    recorded_logprob=-0.11,
    replayed_id=12,
    replayed_text="frac",
    replayed_logprob=-0.69,
)
REPLAYED = ReplayResponse(
    request_id=REQUEST_ID,
    rollout_id=RECORDED.rollout_id,
    verdict="parts",
    tokens=1,
    largest_difference=0.0,
    difference=DIFFERENCE,
    generations=[
        ReplayedGeneration(
            message=1,
            start=0,
            end=3,
            weight_version="7",
            verdict="parts",
            tokens=1,
            largest_difference=0.0,
            mean_difference=0.0,
            difference=DIFFERENCE,
            replica="k2x9q1",
            batch_size=1,
        )
    ],
)
router = APIRouter(tags=["rollouts"])


@router.post(
    "/replay",
    response_model=ReplayResponse,
    **needs("rollout"),
    summary="Generate a rollout again",
    responses={
        200: json_response(REPLAYED),
        429: limited(),
        **refusals(PolicyNotCurrent, RolloutUnknown, RolloutRecordsNotConfigured, reads_body=True),
    },
    openapi_extra=json_request(ReplayRequest(rollout=RECORDED)),
)
async def replay(
    request: Request, services: Services, admitted: Admitted, request_id: RequestId, caller: AuthorizedCaller
) -> Response:
    """Makes each generation of a rollout again: with the recorded tokens before it, its seed and stop strings, under
    the same weights, on the replica that generated then if it runs.

    The verdict says whether the tokens and their log-probabilities are equal, or where they part.
    """
    refuse_other_than_json(request.headers)
    limits = services.rollouts.limits
    body = await read_body(request, limits.max_body_bytes, "send the result alone", admitted.hold_body)
    asked = await asyncio.to_thread(parsed, body)
    del body
    result = await _recorded_result(asked, services, caller)
    recorded = await asyncio.to_thread(services.replayer.read, result)
    await _refuse_unknown_images(result, services, caller)
    admitted.hold_call(1, "rollout", len(recorded.token_ids))
    if (usage := services.rollouts.admission.usage_of(caller)) is not None:
        await usage.take(len(recorded.token_ids))
    answer = await services.replayer.replay(recorded, request_id, caller)
    if asked.rollout is None:
        await _note_verdict(answer, services, caller)
    return Response(answer.model_dump_json(exclude_none=True), media_type=JSON)


async def _note_verdict(answer: ReplayResponse, services: AppServices, caller: Caller) -> None:
    """Notes the verdict in the rollout's record, where it has one."""
    if services.records is None or answer.rollout_id is None:
        return
    note = RecordedReplay(
        at=time.time(), verdict=answer.verdict, tokens=answer.tokens, largest_difference=answer.largest_difference
    )
    await services.records.annotate(answer.rollout_id, caller, note)


def parsed(body: bytearray) -> ReplayRequest:
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
