"""The routes of `/rollouts/{rollout_id}`: what is known of a rollout that has ended."""

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import Response

from deployments.rollout_records.failures import RolloutRecordsNotConfigured, RolloutUnknown
from rollout_client.contract.rollout_records import RecordedGeneration, RolloutRecord
from service.http.authorization import AuthorizedCaller, needs
from service.http.examples import RESULT
from service.http.openapi import json_response, refusals
from service.http.streaming import response_in_parts
from service.rollout_requests.result_encoding import JSON, json_of, pieces
from service.routes.dependencies import Records

RECORD = RolloutRecord(
    rollout=RESULT,
    request_id="step-7",
    group_id="step-7-a1b2c3d4e5f60718-0",
    ended_at=1764200000.0,
    generations=[RecordedGeneration(message=1, start=0, end=3, replica="k2x9q1", batch_size=8, took_s=0.4)],
    steps_s=[0.002],
)
router = APIRouter(prefix="/rollouts", tags=["rollouts"])
RolloutId = Annotated[str, Path(description="The `rollout_id` of a result.")]


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
