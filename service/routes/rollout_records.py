"""The routes of `/rollouts`, `/mismatch` and `/replay`: rollouts that have ended, and what they are compared with."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from deployments.policy.failures import PolicyNotCurrent
from deployments.rollout_records.book import RolloutRecordsNotConfigured, RolloutUnknown, records_not_configured
from rollout_client.contract.records import (
    LogprobsReport,
    Mismatch,
    RecordedRollouts,
    ReplayRequest,
    ReplayResponse,
    ReportAnswer,
    ReportedRollout,
    RolloutRecord,
)
from service.http.openapi import AuthorizedCaller, json_request, limited, needs, refusals
from service.http.request_body import read_body, refuse_other_than_json
from service.http.streaming import response_in_parts
from service.images.request_images import Source, names_of
from service.problems import parsed_model
from service.rollout_requests.result_encoding import JSON, json_of, pieces
from service.routes.dependencies import Admitted, Records, Reports, RequestId, Rollouts, Services

ROLLOUT_ID = "step-7-a1b2c3d4e5f60718-0-0"
router = APIRouter(prefix="/rollouts", tags=["rollouts"], responses=refusals(RolloutRecordsNotConfigured))
unprefixed_router = APIRouter(tags=["rollouts"], responses=refusals(RolloutRecordsNotConfigured))
RolloutId = Annotated[str, Path(description="The `rollout_id` of a result.")]


REPORT = LogprobsReport(reports=[ReportedRollout(rollout_id=ROLLOUT_ID, logprobs=[-0.02, -0.11, -0.001])])


@router.post(
    "/logprobs",
    response_model=ReportAnswer,
    **needs("rollout"),
    summary="Report a trainer's log-probabilities",
    responses=refusals(reads_body=True),
    openapi_extra=json_request(REPORT),
)
async def _report_logprobs(
    request: Request, reports: Reports, admitted: Admitted, rollouts: Rollouts, caller: AuthorizedCaller
) -> Response:
    """Compares what a trainer has computed for the tokens of rollouts with what they were sampled with.

    Causes that show themselves in the recent reports are in the answer, in `GET /mismatch`, in the log and in metrics.
    A rollout without a record is told, and so is a report without numbers or a second one of a rollout; the others are
    compared.
    """
    refuse_other_than_json(request.headers)
    body = await read_body(request, rollouts.limits.max_body_bytes, hold=admitted.hold_body)
    answer = await reports.report(await rollouts.body_parser.parse_reports(body), caller)
    return Response(json_of(answer), media_type=JSON)


@router.get("", response_model=RecordedRollouts, **needs("rollout"), summary="List the rollouts that ended last")
async def _rollout_records(
    records: Records,
    caller: AuthorizedCaller,
    count: Annotated[int, Query(ge=1, le=1000, description="How many, at most.")] = 50,
) -> Response:
    """Those of the caller's key whose records are kept, the newest first."""
    return Response(json_of({"rollouts": await records.store.newest(caller.namespace, count)}), media_type=JSON)


@router.get(
    "/{rollout_id:path}",
    response_model=RolloutRecord,
    **needs("rollout"),
    summary="Get the record of a rollout",
    responses=refusals(RolloutUnknown),
)
async def _rollout_record(rollout_id: RolloutId, records: Records, caller: AuthorizedCaller) -> Response:
    """The result of a rollout that has ended, with where and how each of its generations was made.

    It is kept for the key that has played it, until newer ones need its room (`rollout_records.max_bytes`).
    """
    return await response_in_parts(pieces(json_of(await records.record(rollout_id, caller))), JSON)


@unprefixed_router.post(
    "/replay",
    response_model=ReplayResponse,
    **needs("rollout"),
    summary="Generate a rollout again",
    responses={
        429: limited(),
        **refusals(PolicyNotCurrent, RolloutUnknown, RolloutRecordsNotConfigured, reads_body=True),
    },
    openapi_extra=json_request(ReplayRequest(rollout_id=ROLLOUT_ID)),
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
    asked = await asyncio.to_thread(parsed_model, body, ReplayRequest)
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


@unprefixed_router.get("/mismatch", response_model=Mismatch, **needs("read"), summary="Get the mismatch ledger")
async def _mismatch(records: Records, caller: AuthorizedCaller) -> Response:
    """How far the log-probabilities that trainers reported part from those that were sampled with, by replica, version
    and policy; the worst rollouts; and the causes that were found.
    """
    return Response(json_of(await records.store.mismatch(caller.namespace)), media_type=JSON)
