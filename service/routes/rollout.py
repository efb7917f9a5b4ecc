"""`POST /rollout`: reads the request, plays it, and responds in the format that the caller accepts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from rollout_client.arrow.schema import ARROW
from rollout_client.contract import RolloutResponse, RolloutSummary, SampleResult
from rollout_client.problem_contract import FieldProblem
from service.requests.rollout_request import read_rollout_request
from service.responses.arrow_encoder import ArrowResponseEncoder
from service.responses.encoder import ResponseEncoder
from service.responses.json_encoder import JsonResponseEncoder, pieces
from service.responses.ndjson import NDJSON, problem_line, sample_line, summary_line
from service.responses.problems import SAMPLE_FAILED, RequestProblem, internal_error
from service.rollout_service import RunningRollout, SampleFailed
from service.routes import descriptions
from service.routes.dependencies import Admitted, RequestId, Rollouts
from service.routes.error_handlers import log_unexpected_error

MOST_TOKENS_INLINE = 8192
"""Encoding this many takes half a millisecond, several times the cost of handing them to a thread."""
BYTES_PER_TOKEN = 16
"""Bytes of text that take as long as a token with its log-probability."""
MOST_ROLLOUTS_INLINE = 512
"""Of a summary: their metrics take some milliseconds."""
Encoded = TypeVar("Encoded")
router = APIRouter(tags=["rollouts"])


@router.post("/rollout", response_model=RolloutResponse, **descriptions.ROLLOUT)
async def rollout(request: Request, rollouts: Rollouts, admitted: Admitted, request_id: RequestId) -> Response:
    """Plays every sample and responds in input order.

    `Accept: application/x-ndjson` streams each rollout when it ends; `Accept: application/vnd.apache.arrow.stream`
    responds in Arrow.
    """
    limits, parser = rollouts.limits, rollouts.body_parser
    received = await read_rollout_request(request, limits.max_body_bytes, parser, admitted)
    body_bytes = received.body_bytes + await rollouts.take_samples(received.request, admitted.hold_body)
    echoed_bytes = body_bytes // len(received.request.samples)
    running = await rollouts.rollout(received.request, request_id, body_bytes)
    accepted = request.headers.get("accept", "")
    if NDJSON in accepted:
        return StreamingResponse(ndjson_lines(running, echoed_bytes), media_type=NDJSON)
    encoder: ResponseEncoder = JsonResponseEncoder()
    if ARROW in accepted:
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
                await encode_beside_others(result_size, partial(encoder.add, position, result, echo))
                size, count = size + result_size, count + 1
    except SampleFailed as failed:
        raise sample_failed(failed) from failed
    parts = encoder.body(await summary_of(running, count))
    if size <= MOST_TOKENS_INLINE:
        return Response(b"".join(parts), media_type=encoder.media_type)
    # An error can occur only while the first part is made: before the status is sent. Starlette makes the other parts
    # in threads as well.
    first = await asyncio.to_thread(next, parts)
    # Serve's proxy accepts only `bytes`.
    return StreamingResponse(map(bytes, chain([first], parts)), media_type=encoder.media_type)


async def ndjson_lines(running: RunningRollout, echoed_bytes: int) -> AsyncIterator[bytes]:
    """Yields the lines of `service.responses.ndjson`, each rollout when it ends, in parts if it is large."""
    count = 0
    try:
        async with aclosing(running) as ended:
            async for position, result, _ in ended:
                line = partial(sample_line, position, result)
                for part in pieces(await encode_beside_others(size_of(result, echoed_bytes), line)):
                    yield part
                count += 1
        yield summary_line(await summary_of(running, count))
    except SampleFailed as failed:
        yield last_line(sample_failed(failed), running.request_id)
    except Exception as error:  # noqa: BLE001 - the status has been sent: only a line can still tell the caller
        log_unexpected_error(error, running.request_id)
        yield last_line(internal_error(error), running.request_id)


async def encode_beside_others(size: int, encode: Callable[[], Encoded]) -> Encoded:
    """Encodes one rollout; a large one in a thread, so that the event loop serves other requests meanwhile."""
    if size > MOST_TOKENS_INLINE:
        return await asyncio.to_thread(encode)
    await asyncio.sleep(0)
    return encode()


async def summary_of(running: RunningRollout, count: int) -> RolloutSummary:
    """The summary of `count` rollouts; that of many is computed in a thread."""
    if count > MOST_ROLLOUTS_INLINE:
        return await asyncio.to_thread(running.final_summary)
    return running.summary


def size_of(result: SampleResult, echoed_bytes: int) -> int:
    """About how large a rollout is, in tokens."""
    text = sum(len(message.content) for message in result.message_log) + echoed_bytes
    return sum(len(message.token_ids) for message in result.message_log) + text // BYTES_PER_TOKEN


def last_line(problem: RequestProblem, request_id: str) -> bytes:
    return problem_line(problem.problem.model_copy(update={"request_id": request_id}))


def sample_failed(failed: SampleFailed) -> RequestProblem:
    field = f"samples[{failed.sample_position}]"
    return RequestProblem(SAMPLE_FAILED, [FieldProblem(field=field, message=str(failed), value=failed.kind)])
