"""The routes of `/rollouts` and `/mismatch`: records of rollouts that have ended, and what trainers say of them."""

import asyncio
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from deployments.rollout_records.failures import RolloutRecordsNotConfigured, RolloutUnknown
from rollout_client.arrow.schema import ARROW
from rollout_client.contract.mismatch import (
    LogprobsReport,
    Mismatch,
    MismatchCause,
    MismatchedRollout,
    MismatchPeriod,
    MismatchSums,
    RefusedReport,
    ReportAnswer,
    ReportedRollout,
)
from rollout_client.contract.rollout_records import (
    RecordedGeneration,
    RecordedRollout,
    RecordedRollouts,
    RecordedState,
    RecordedStep,
    RolloutRecord,
)
from service.http.authorization import AuthorizedCaller, needs
from service.http.examples import RESULT
from service.http.openapi import BINARY, content, json_content, json_response, refusals
from service.http.request_body import read_body, rollout_media_type
from service.http.streaming import response_in_parts
from service.rollout_records.trainer_reports import reports_of_arrow, reports_of_json
from service.rollout_requests.result_encoding import JSON, json_of, pieces
from service.routes.dependencies import Admitted, Records, Reports, Rollouts

ROLLOUT_ID = "step-7-a1b2c3d4e5f60718-0-0"
RECORD = RolloutRecord(
    rollout=RESULT,
    request_id="step-7",
    group_id="step-7-a1b2c3d4e5f60718-0",
    ended_at=1764200000.0,
    priority="train",
    began_at=1764199999.5,
    generations=[
        RecordedGeneration(
            message=1, start=0, end=3, replica="k2x9q1", batch_size=8, took_s=0.4, began_at=1764199999.51
        )
    ],
    steps=[RecordedStep(turn=0, began_at=1764199999.92, took_s=0.002)],
    states=[RecordedState(turn=0, extra_env_info={"ground_truth": "4"})],
)
RECORDED = RecordedRollouts(
    rollouts=[
        RecordedRollout(
            rollout_id=ROLLOUT_ID,
            request_id="step-7",
            task_name="math",
            status="completed",
            total_reward=1.0,
            ended_at=1764200000.0,
        )
    ]
)
SUMS = MismatchSums(tokens=2048, mean_ratio=1.002, share_beyond=0.0, largest_ratio=1.06)
MISMATCH = Mismatch(
    tokens=2048,
    mean_ratio=1.002,
    largest_ratio=1.06,
    rollouts=16,
    by={"replica": {"k2x9q1": SUMS}, "version": {"7": SUMS}},
    history=[
        MismatchPeriod(
            at=1764200040.0, replica="k2x9q1", version="7", tokens=2048, mean_ratio=1.002, largest_ratio=1.06
        )
    ],
    worst=[MismatchedRollout(rollout_id=ROLLOUT_ID, mean_ratio=1.01, largest_ratio=1.06)],
    causes=[],
)
router = APIRouter(prefix="/rollouts", tags=["rollouts"])
mismatch_router = APIRouter(tags=["rollouts"])
RolloutId = Annotated[str, Path(description="The `rollout_id` of a result.")]


REPORT = LogprobsReport(reports=[ReportedRollout(rollout_id=ROLLOUT_ID, logprobs=[-0.02, -0.11, -0.001])])
ANSWER = ReportAnswer(compared=1, mean_ratio=1.002, largest_ratio=1.01)


@router.post(
    "/logprobs",
    response_model=ReportAnswer,
    **needs("rollout"),
    summary="Report a trainer's log-probabilities",
    responses={200: json_response(ANSWER), **refusals(RolloutRecordsNotConfigured, reads_body=True)},
    openapi_extra={"requestBody": {"required": True, "content": {JSON: json_content(REPORT), ARROW: content(BINARY)}}},
)
async def report_logprobs(
    request: Request, reports: Reports, admitted: Admitted, rollouts: Rollouts, caller: AuthorizedCaller
) -> Response:
    """Compares what a trainer has computed for the tokens of rollouts with what they were sampled with.

    The body is JSON or, smaller and faster for a training step, one Arrow stream with the same fields as columns.
    Causes that show themselves in the recent reports are in the answer, in `GET /mismatch`, in the log and in metrics.
    A rollout without a record is told, and so is a report without numbers or a second one of a rollout; the others are
    compared.
    """
    read = reports_of_arrow if rollout_media_type(request.headers) == ARROW else reports_of_json
    body = await read_body(request, rollouts.limits.max_body_bytes, hold=admitted.hold_body)
    outcome = await reports.report(await asyncio.to_thread(read, body), caller)
    said = ReportAnswer(
        compared=outcome.compared,
        mean_ratio=outcome.all.mean_ratio,
        share_beyond=outcome.all.share_beyond,
        largest_ratio=outcome.all.largest_ratio,
        refused=[RefusedReport(rollout_id=name, message=message) for name, message in outcome.refused],
        causes=[MismatchCause(**asdict(one.finding), since=one.since, last=one.last) for one in outcome.causes],
    )
    return Response(json_of(said), media_type=JSON)


@router.get(
    "",
    response_model=RecordedRollouts,
    **needs("rollout"),
    summary="List the rollouts that ended last",
    responses={200: json_response(RECORDED), **refusals(RolloutRecordsNotConfigured)},
)
async def rollout_records(
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
    responses={200: json_response(RECORD), **refusals(RolloutUnknown, RolloutRecordsNotConfigured)},
)
async def rollout_record(rollout_id: RolloutId, records: Records, caller: AuthorizedCaller) -> Response:
    """The result of a rollout that has ended, with where and how each of its generations was made.

    It is kept for `rollout_records.keep_s` of the config, for the key that has played it.
    """
    record = json_of(await records.record(rollout_id, caller))
    return await response_in_parts(pieces(record), JSON)


@mismatch_router.get(
    "/mismatch",
    response_model=Mismatch,
    **needs("read"),
    summary="Get the mismatch ledger",
    responses={200: json_response(MISMATCH), **refusals(RolloutRecordsNotConfigured)},
)
async def mismatch(records: Records, caller: AuthorizedCaller) -> Response:
    """How far the log-probabilities that trainers reported part from those that were sampled with, by what is known of
    where and how each token was made; the worst rollouts; and the causes that were found.
    """
    return Response(json_of(await records.store.mismatch(caller.namespace)), media_type=JSON)
