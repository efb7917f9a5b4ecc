"""The routes of `/jobs`: rollouts that outlive their connection, with numbered events."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from deployments.jobs.records import JobRecord
from rollout_client.contract.jobs import Acknowledgement, JobCursor, JobList, JobStatus
from service.http.authorization import AuthorizedCaller, needs
from service.http.request_body import read_json_body
from service.http.streaming import EMPTY_LINE, PERIOD_S, SSE, SSE_HEARTBEAT, with_heartbeats
from service.jobs.events import job_event_lines, pages_of
from service.jobs.ledger import cursor_of
from service.jobs.submission import (
    Submission,
    heartbeat_s,
    idempotency_key,
    last_event_id,
    namespace_of,
    required_key,
    submitted,
)
from service.rollout_requests.json_encoder import JSON, json_of
from service.rollout_requests.result_encoding import NDJSON
from service.routes import descriptions
from service.routes.dependencies import Admitted, Jobs, OptionalJobs, RequestId, Rollouts

MOST_BYTES_OF_AN_ACKNOWLEDGEMENT = 1024
JobId = Annotated[str, Path(description="The `job_id` that `POST /jobs` has answered.")]
router = APIRouter(prefix="/jobs", tags=["jobs"])


@router.post("", response_model=JobStatus, **needs("rollout"), **descriptions.SUBMIT_JOB)
async def submit_job(
    request: Request,
    rollouts: Rollouts,
    jobs: OptionalJobs,
    admitted: Admitted,
    request_id: RequestId,
    caller: AuthorizedCaller,
) -> Response:
    """Takes what `POST /rollout` takes, and answers once it has begun. It is played to its end, whoever listens."""
    key = idempotency_key(request.headers)
    submission = Submission(caller, request_id, key, runs_alone=True)
    opened = await submitted(request, submission, rollouts.limits.max_body_bytes, admitted, jobs)
    return accepted(opened.record)


@router.get("", **needs("rollout"), **descriptions.JOBS)
async def jobs(jobs: Jobs, caller: AuthorizedCaller) -> JobList:
    """Those of the caller's key, the newest first."""
    return JobList(jobs=[status_of(record) for record in await jobs.store.records(namespace_of(caller))])


@router.get("/{job_id}", **needs("rollout"), **descriptions.JOB)
async def job(job_id: JobId, jobs: Jobs, caller: AuthorizedCaller) -> JobStatus:
    """How far the job is."""
    return status_of(await jobs.store.record(job_id, namespace_of(caller)))


@router.get("/{job_id}/events", response_class=StreamingResponse, **needs("rollout"), **descriptions.JOB_EVENTS)
async def job_events(
    request: Request,
    job_id: JobId,
    jobs: Jobs,
    caller: AuthorizedCaller,
    after: Annotated[int | None, Query(ge=0, lt=2**53, description="Goes on after the event of this number.")] = None,
    follow: Annotated[bool, Query(description="Whether to wait for events that are not there yet.")] = True,
) -> Response:
    """Each group when it has ended, then the summary or the problem. A stream that broke goes on with `after`.

    JSON lines, each a `JobEvent`; with `Accept: text/event-stream` server-sent events, which clients of them go on with
    by `Last-Event-ID`. A stream that is silent for 15 s sends an empty line, or an empty comment.
    """
    accepts_sse = SSE in request.headers.get("accept", "")
    begin = after if after is not None else last_event_id(request.headers) or 0
    pages = pages_of(jobs.store, job_id, namespace_of(caller), begin, follow)
    first = await anext(pages)
    lines = job_event_lines(first, pages, accepts_sse)
    period_s = heartbeat_s(request.headers) or PERIOD_S
    stream = with_heartbeats(lines, period_s, SSE_HEARTBEAT if accepts_sse else EMPTY_LINE)
    return StreamingResponse(stream, media_type=SSE if accepts_sse else NDJSON)


@router.get("/{job_id}/cursor", **needs("rollout"), **descriptions.JOB_CURSOR)
async def job_cursor(
    job_id: JobId,
    jobs: Jobs,
    caller: AuthorizedCaller,
    after: Annotated[int, Query(ge=0, lt=2**53, description="The last event that has arrived; 0 for none.")],
) -> JobCursor:
    """Names what a job over a data set (`samples_from`) has delivered up to an event: for a trainer's checkpoint.

    Events that were acknowledged count too. Nothing changes.
    """
    ledger = await jobs.store.ledger(job_id, namespace_of(caller), after)
    return await asyncio.to_thread(cursor_of, job_id, after, ledger)


@router.post("/{job_id}/acknowledge", response_model=JobStatus, **needs("rollout"), **descriptions.ACKNOWLEDGE)
async def acknowledge(request: Request, job_id: JobId, jobs: Jobs, caller: AuthorizedCaller) -> JobStatus:
    """Events up to `last` have arrived: the service need not keep them."""
    acknowledged = await read_json_body(request, Acknowledgement, MOST_BYTES_OF_AN_ACKNOWLEDGEMENT, "send one number")
    return status_of(await jobs.store.acknowledge(job_id, namespace_of(caller), acknowledged.last))


@router.delete("", **needs("rollout"), **descriptions.DELETE_RUN)
async def delete_run(request: Request, jobs: Jobs, caller: AuthorizedCaller) -> Response:
    """As `DELETE /jobs/{job_id}`, for the job or the run that was posted with this `Idempotency-Key`."""
    await jobs.store.delete_key(required_key(request.headers), namespace_of(caller))
    return Response(status_code=204)


@router.delete("/{job_id}", **needs("rollout"), **descriptions.DELETE_JOB)
async def delete_job(job_id: JobId, jobs: Jobs, caller: AuthorizedCaller) -> Response:
    """Cancels what still runs, and forgets the job with its events and its key."""
    await jobs.store.delete(job_id, namespace_of(caller))
    return Response(status_code=204)


def accepted(record: JobRecord, applied: str | None = None) -> Response:
    """202 with the place of the job. Args: `applied` is the preference that was followed, if one was."""
    headers = {"Location": f"/v1/jobs/{record.job_id}"}
    if applied is not None:
        headers["Preference-Applied"] = applied
    return Response(json_of(status_of(record)), 202, headers, media_type=JSON)


def status_of(record: JobRecord) -> JobStatus:
    return JobStatus(
        job_id=record.job_id,
        state=record.state,
        request_id=record.request_id,
        created_at=record.created_at,
        ended_at=record.ended_at,
        last_event=record.last_event,
        acknowledged=record.acknowledged,
        idempotency_key=record.key,
    )
