"""The routes of `/jobs`: rollouts that outlive their connection, with numbered events."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from deployments.jobs.records import (
    EventsAcknowledged,
    EventUnknown,
    JobRecord,
    JobsFull,
    JobsNotConfigured,
    JobUnknown,
    KeyReused,
    NoDataSet,
)
from deployments.policy.failures import PolicyNotCurrent, PolicyUnknown
from deployments.rollout_records.book import RolloutRecordsNotConfigured
from rollout_client.contract.jobs import Acknowledgement, JobCursor, JobEvent, JobList, JobStatus
from rollout_client.contract.messages import PromptMessage
from rollout_client.contract.rollouts import RolloutRequest, SampleInput, Sampling
from service.http.openapi import (
    AuthorizedCaller,
    content,
    header_parameter,
    json_request,
    limited,
    needs,
    refusals,
    schema_of,
)
from service.http.request_body import read_json_body
from service.http.streaming import PERIOD_S, with_heartbeats
from service.jobs.codec import cursor_of
from service.jobs.events import events_after, job_event_lines
from service.jobs.submission import heartbeat_s, required_key, submitted
from service.rollout_requests.result_encoding import JSON, NDJSON, json_of
from service.routes.dependencies import Admitted, Jobs, OptionalJobs, Rollouts

MOST_BYTES_OF_AN_ACKNOWLEDGEMENT = 1024
JobId = Annotated[str, Path(description="The `job_id` that `POST /jobs` has answered.")]
_SAMPLE = SampleInput(
    task_name="math",
    messages=[PromptMessage(role="user", content="What is 2 + 2?")],
    extra_env_info={"ground_truth": "4"},
)
IDEMPOTENCY_KEY = header_parameter(
    "Idempotency-Key",
    "Names the request among the caller's: sent again with the same body it attaches to the run, or gets its answer.",
    '"step-17"',
)
PREFER = header_parameter(
    "Prefer", "`heartbeat=15`: a stream that is silent for so many seconds sends an empty line.", "heartbeat=15"
)
CONTENT_ENCODING = header_parameter("Content-Encoding", "How the body is compressed: `gzip` or `zstd`.", "zstd")
ROLLOUT_BODY = json_request(
    RolloutRequest(samples=[_SAMPLE], num_generations=1, sampling=Sampling(temperature=1.0, max_new_tokens=64))
)
"""The body of `POST /rollout` and `POST /jobs`."""
router = APIRouter(prefix="/jobs", tags=["jobs"])
_UNKNOWN = refusals(JobUnknown, JobsNotConfigured)


@router.post(
    "",
    response_model=JobStatus,
    **needs("rollout"),
    summary="Play samples as a job",
    status_code=202,
    responses={
        202: {"description": "The job has begun; see `Location`"},
        429: limited(JobsFull),
        **refusals(
            PolicyNotCurrent, PolicyUnknown, KeyReused, JobsNotConfigured, RolloutRecordsNotConfigured, reads_body=True
        ),
    },
    openapi_extra={**ROLLOUT_BODY, "parameters": [IDEMPOTENCY_KEY, CONTENT_ENCODING]},
)
async def _submit_job(
    request: Request, rollouts: Rollouts, jobs: OptionalJobs, admitted: Admitted, caller: AuthorizedCaller
) -> Response:
    """Takes the body of `POST /rollout`, and answers once the job has begun. It needs no listener to be played."""
    opened = await submitted(request, caller, rollouts.limits.max_body_bytes, admitted, jobs)
    headers = {"Location": f"/v1/jobs/{opened.record.job_id}"}
    return Response(json_of(_status_of(opened.record)), 202, headers, media_type=JSON)


@router.get("", **needs("rollout"), summary="List the jobs", responses=refusals(JobsNotConfigured))
async def _jobs(jobs: Jobs, caller: AuthorizedCaller) -> JobList:
    """The jobs of the caller's key, newest first."""
    return JobList(jobs=[_status_of(record) for record in await jobs.store.records(caller.namespace)])


@router.get("/{job_id}", **needs("rollout"), summary="Get the state of a job", responses=_UNKNOWN)
async def _job(job_id: JobId, jobs: Jobs, caller: AuthorizedCaller) -> JobStatus:
    """State and progress of the job."""
    return _status_of(await jobs.store.record(job_id, caller.namespace))


@router.get(
    "/{job_id}/events",
    response_class=StreamingResponse,
    **needs("rollout"),
    summary="Get the events of a job",
    responses={
        200: {"description": "One event a line", "content": {NDJSON: content(schema_of(JobEvent))}},
        **refusals(JobUnknown, EventsAcknowledged, EventUnknown, JobsNotConfigured),
    },
    openapi_extra={"parameters": [PREFER]},
)
async def _job_events(
    request: Request,
    job_id: JobId,
    jobs: Jobs,
    caller: AuthorizedCaller,
    after: Annotated[int, Query(ge=0, lt=2**53, description="Goes on after the event of this number.")] = 0,
    follow: Annotated[bool, Query(description="Whether to wait for events that are not there yet.")] = True,
) -> Response:
    """Streams each group when it has ended, then the summary or the problem. `after` continues a broken stream.

    JSON lines, each a `JobEvent`. A stream that is silent for 15 s sends an empty line.
    """
    events = await events_after(jobs.store, job_id, caller.namespace, after, follow)
    stream = with_heartbeats(job_event_lines(events), heartbeat_s(request.headers) or PERIOD_S)
    return StreamingResponse(stream, media_type=NDJSON)


@router.get(
    "/{job_id}/cursor",
    **needs("rollout"),
    summary="Get the cursor of a job over a data set",
    responses=refusals(JobUnknown, EventUnknown, NoDataSet, JobsNotConfigured),
)
async def _job_cursor(
    job_id: JobId,
    jobs: Jobs,
    caller: AuthorizedCaller,
    after: Annotated[int, Query(ge=0, lt=2**53, description="The last event that has arrived; 0 for none.")],
) -> JobCursor:
    """Names the samples that a job over a data set (`samples_from`) has delivered up to an event, for a checkpoint.

    Events that were acknowledged count too. Nothing changes.
    """
    ledger = await jobs.store.ledger(job_id, caller.namespace, after)
    return await asyncio.to_thread(cursor_of, job_id, after, ledger)


@router.post(
    "/{job_id}/acknowledge",
    response_model=JobStatus,
    **needs("rollout"),
    summary="Acknowledge events of a job",
    responses=refusals(JobUnknown, EventUnknown, JobsNotConfigured, reads_body=True),
    openapi_extra=json_request(Acknowledgement(last=2)),
)
async def _acknowledge(request: Request, job_id: JobId, jobs: Jobs, caller: AuthorizedCaller) -> JobStatus:
    """Confirms the events up to `last`, which the service then need not keep."""
    acknowledged = await read_json_body(request, Acknowledgement, MOST_BYTES_OF_AN_ACKNOWLEDGEMENT, "send one number")
    return _status_of(await jobs.store.acknowledge(job_id, caller.namespace, acknowledged.last))


@router.delete(
    "",
    **needs("rollout"),
    summary="Delete the job of an Idempotency-Key",
    status_code=204,
    responses=_UNKNOWN,
    openapi_extra={"parameters": [IDEMPOTENCY_KEY]},
)
async def _delete_run(request: Request, jobs: Jobs, caller: AuthorizedCaller) -> Response:
    """As `DELETE /jobs/{job_id}`, for the job or the run that was posted with this `Idempotency-Key`."""
    await jobs.store.delete_key(required_key(request.headers), caller.namespace)
    return Response(status_code=204)


@router.delete("/{job_id}", **needs("rollout"), summary="Delete a job", status_code=204, responses=_UNKNOWN)
async def _delete_job(job_id: JobId, jobs: Jobs, caller: AuthorizedCaller) -> Response:
    """Cancels the rollouts that still run, and deletes the job with its events and its key."""
    await jobs.store.delete(job_id, caller.namespace)
    return Response(status_code=204)


def _status_of(record: JobRecord) -> JobStatus:
    fields = {name: getattr(record, name) for name in JobStatus.model_fields.keys() - {"idempotency_key"}}
    return JobStatus(**fields, idempotency_key=record.key)
