"""`POST /rollout`: reads the request, plays it, and responds in the format that the caller accepts."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from rollout_client.arrow.schema import ARROW
from rollout_client.contract.jobs import RESPOND_ASYNC
from rollout_client.contract.rollouts import RolloutResponse
from service.http.authorization import AuthorizedCaller, needs
from service.http.error_handlers import log_unexpected_error
from service.http.streaming import response_in_parts, with_heartbeats
from service.jobs.events import answer_of, pages_of
from service.jobs.submission import (
    Submission,
    heartbeat_s,
    idempotency_key,
    namespace_of,
    required,
    responds_async,
    submitted,
)
from service.problems import RequestProblem, internal_error
from service.rollout_requests.arrow_encoder import ArrowResponseEncoder
from service.rollout_requests.body_parser import read_rollout_request
from service.rollout_requests.json_encoder import JsonResponseEncoder, ResponseEncoder, pieces
from service.rollout_requests.result_encoding import (
    NDJSON,
    encode_beside_others,
    is_small,
    problem_line,
    sample_failed,
    sample_line,
    size_of,
    summary_line,
    summary_of,
)
from service.rollout_requests.rollout_service import RunningRollout, SampleFailed
from service.routes import descriptions
from service.routes.dependencies import Admitted, OptionalJobs, RequestId, Rollouts
from service.routes.jobs import accepted

router = APIRouter(tags=["rollouts"])


@router.post("/rollout", response_model=RolloutResponse, **needs("rollout"), **descriptions.ROLLOUT)
async def rollout(
    request: Request,
    rollouts: Rollouts,
    jobs: OptionalJobs,
    admitted: Admitted,
    request_id: RequestId,
    caller: AuthorizedCaller,
) -> Response:
    """Plays every sample and responds in input order.

    `Accept: application/x-ndjson` streams each rollout when it ends; `Accept: application/vnd.apache.arrow.stream`
    responds in Arrow. With an `Idempotency-Key` the request can be posted again: it attaches to the one that runs, or
    gets its answer. With `Prefer: respond-async` it becomes a job (`/jobs`).
    """
    key, is_async = idempotency_key(request.headers), responds_async(request.headers)
    if key is not None or is_async:
        submission = Submission(caller, request_id, key, runs_alone=is_async)
        opened = await submitted(request, submission, rollouts.limits.max_body_bytes, admitted, jobs)
        if is_async:
            return accepted(opened.record, RESPOND_ASYNC)
        runner, job_id = required(jobs), opened.record.job_id
        pages = pages_of(runner.store, job_id, namespace_of(caller), after=0)
        accepted_types, gathering = request.headers.get("accept", ""), runner.gathering(job_id)
        return await answer_of(pages, accepted_types, heartbeat_s(request.headers), gathering)
    limits, parser = rollouts.limits, rollouts.body_parser
    received = await read_rollout_request(request, limits.max_body_bytes, parser, admitted)
    body_bytes = received.body_bytes + await rollouts.take_samples(received.request, admitted.hold_body)
    echoed_bytes = body_bytes // len(received.request.samples)
    running = await rollouts.rollout(received.request, request_id, body_bytes, caller)
    wanted = request.headers.get("accept", "")
    if NDJSON in wanted:
        lines = with_heartbeats(ndjson_lines(running, echoed_bytes), heartbeat_s(request.headers))
        return StreamingResponse(lines, media_type=NDJSON)
    encoder: ResponseEncoder = JsonResponseEncoder()
    if ARROW in wanted:
        groups, rollouts_per_group = len(received.request.samples), received.request.num_generations
        encoder = ArrowResponseEncoder(echoed_bytes, rollouts_per_group, groups)
    return await whole_response(running, encoder, echoed_bytes)


async def whole_response(running: RunningRollout, encoder: ResponseEncoder, echoed_bytes: int) -> Response:
    """Responds when the last rollout has ended; until then the response can still become a problem document.

    Args:
        echoed_bytes: about what each rollout repeats of its sample.
    """
    size, count = 0, 0
    try:
        async with aclosing(running) as ended:
            async for position, result, echo in ended:
                result_size = size_of(result, echoed_bytes)
                await encode_beside_others(result_size, partial(encoder.add, position, result, echo), running.observer)
                size, count = size + result_size, count + 1
    except SampleFailed as failed:
        raise sample_failed(failed) from failed
    parts = encoder.body(await summary_of(running, count))
    if is_small(size):
        return Response(b"".join(parts), media_type=encoder.media_type)
    return await response_in_parts(parts, encoder.media_type)


async def ndjson_lines(running: RunningRollout, echoed_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yields the lines of a stream, each rollout when it ends, in parts if it is large."""
    count = 0
    try:
        async with aclosing(running) as ended:
            async for position, result, _ in ended:
                line = partial(sample_line, position, result)
                for part in pieces(await encode_beside_others(size_of(result, echoed_bytes), line, running.observer)):
                    yield part
                count += 1
        yield summary_line(await summary_of(running, count))
    except SampleFailed as failed:
        yield last_line(sample_failed(failed), running.request_id)
    except Exception as error:  # noqa: BLE001 - the status has been sent: only a line can still tell the caller
        log_unexpected_error(error, running.request_id)
        yield last_line(internal_error(error), running.request_id)


def last_line(problem: RequestProblem, request_id: str) -> bytes:
    return problem_line(problem.problem.model_copy(update={"request_id": request_id}))
