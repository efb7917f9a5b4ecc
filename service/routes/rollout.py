"""`POST /rollout`: reads the request, plays it, and responds in the format that the caller accepts."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from deployments.jobs.records import EventsAcknowledged, JobsFull, JobsNotConfigured, KeyReused
from deployments.policy.failures import PolicyNotCurrent, PolicyUnknown
from deployments.rollout_records.book import RolloutRecordsNotConfigured
from rollout_client.arrow.schema import ARROW
from rollout_client.calls.ndjson import StreamLine
from rollout_client.contract.rollouts import RolloutResponse
from service.http.middlewares import log_unexpected_error, request_id_of
from service.http.openapi import BINARY, AuthorizedCaller, content, limited, needs, refusal, refusals, schema_of
from service.http.streaming import response_in_parts, with_heartbeats
from service.jobs.events import answer_of, events_after
from service.jobs.submission import heartbeat_s, idempotency_key, required, submitted
from service.problems import RequestProblem, internal_error
from service.rollout_requests.arrow_encoder import ArrowResponseEncoder
from service.rollout_requests.body_parser import read_rollout_request
from service.rollout_requests.result_encoding import (
    NDJSON,
    JsonResponseEncoder,
    ResponseEncoder,
    is_small,
    pieces,
    problem_line,
    summary_line,
)
from service.rollout_requests.running_rollout import RunningRollout
from service.routes.dependencies import Admitted, OptionalJobs, Rollouts
from service.routes.jobs import CONTENT_ENCODING, IDEMPOTENCY_KEY, PREFER, ROLLOUT_BODY

router = APIRouter(tags=["rollouts"])


@router.post(
    "/rollout",
    response_model=RolloutResponse,
    **needs("rollout"),
    summary="Play samples",
    responses={
        200: {
            "description": "All rollouts in input order; as NDJSON one line per rollout, then one with the summary",
            "content": {NDJSON: content(schema_of(StreamLine)), ARROW: content(BINARY)},
        },
        429: limited(JobsFull),
        502: refusal(["A sample failed, and the request said on_error: fail"]),
        **refusals(
            PolicyNotCurrent,
            PolicyUnknown,
            KeyReused,
            EventsAcknowledged,
            JobsNotConfigured,
            RolloutRecordsNotConfigured,
            reads_body=True,
        ),
    },
    openapi_extra={**ROLLOUT_BODY, "parameters": [CONTENT_ENCODING, IDEMPOTENCY_KEY, PREFER]},
)
async def _rollout(
    request: Request, rollouts: Rollouts, jobs: OptionalJobs, admitted: Admitted, caller: AuthorizedCaller
) -> Response:
    """Plays every sample and responds in input order.

    `Accept: application/x-ndjson` streams each rollout when it ends; `Accept: application/vnd.apache.arrow.stream`
    responds in Arrow. With an `Idempotency-Key` the request can be posted again: it attaches to the one that runs, or
    gets its answer.
    """
    if idempotency_key(request.headers) is not None:
        opened = await submitted(request, caller, rollouts.limits.max_body_bytes, admitted, jobs)
        runner, job_id = required(jobs), opened.record.job_id
        events = await events_after(runner.store, job_id, caller.namespace, after=0)
        accepted_types, gathering = request.headers.get("accept", ""), runner.gathering(job_id)
        return await answer_of(events, accepted_types, heartbeat_s(request.headers), gathering)
    limits, parser = rollouts.limits, rollouts.body_parser
    asked, body_bytes = await read_rollout_request(request, limits.max_body_bytes, parser, admitted)
    body_bytes = await rollouts.take_samples(asked, admitted.hold_body, caller, body_bytes)
    running = await rollouts.rollout(asked, request_id_of(request), body_bytes, caller)
    wanted = request.headers.get("accept", "")
    if NDJSON in wanted:
        lines = with_heartbeats(_ndjson_lines(running), heartbeat_s(request.headers))
        return StreamingResponse(lines, media_type=NDJSON)
    encoder = ArrowResponseEncoder(running.echoed_bytes) if ARROW in wanted else JsonResponseEncoder()
    return await _whole_response(running, encoder)


async def _whole_response(running: RunningRollout, encoder: ResponseEncoder) -> Response:
    """Responds when the last rollout has ended; until then the response can still become a problem document."""
    async for _ in running.encoded(encoder.add):
        pass
    parts = encoder.body(await running.final_summary())
    if is_small(running.size):
        return Response(b"".join(parts), media_type=encoder.media_type)
    return await response_in_parts(parts, encoder.media_type)


async def _ndjson_lines(running: RunningRollout) -> AsyncGenerator[bytes, None]:
    """Yields the lines of a stream, each rollout when it ends, in parts if it is large."""
    try:
        async with aclosing(running.lines()) as lines:
            async for _, line in lines:
                for part in pieces(line):
                    yield part
        yield summary_line(await running.final_summary())
    except RequestProblem as problem:
        yield problem_line(problem, running.request_id)
    except Exception as error:  # noqa: BLE001 - the status has been sent: only a line can still tell the caller
        log_unexpected_error(error, running.request_id)
        yield problem_line(internal_error(error), running.request_id)
