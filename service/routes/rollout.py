"""`POST /rollout`: reads the body, plays it, and answers in the format that the caller accepts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import TypeVar
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import ValidationError

from deployments.policy.failures import PolicyNotCurrent
from rollout_client.arrow.schema import ARROW
from rollout_client.contract import RolloutRequest, RolloutResponse, SampleResult
from rollout_client.problem_contract import FieldProblem
from service.requests.arrow_body import arrow_request
from service.requests.body import read_body
from service.responses.arrow_encoder import ArrowResponseEncoder
from service.responses.encoder import ResponseEncoder
from service.responses.json_encoder import JSON, JsonResponseEncoder, json_of
from service.responses.problems import RequestProblem, internal_error, problem_of, problem_responses
from service.rollout_service import RolloutService, RunningRollout, SampleFailed

NDJSON = "application/x-ndjson"
MOST_BYTES_INLINE = 2**16
"""Reading so many takes most of a millisecond, several times what the way to a thread and back costs."""
MOST_TOKENS_INLINE = 8192
"""Encoding so many takes half a millisecond, several times what the way to a thread and back costs."""
Encoded = TypeVar("Encoded")
ROLLOUT_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {"schema": {"$ref": "#/components/schemas/RolloutRequest"}},
            ARROW: {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


def rollout_routes(rollouts: RolloutService) -> APIRouter:
    routes = APIRouter()

    @routes.post(
        "/rollout",
        response_model=RolloutResponse,
        responses={200: {"content": {NDJSON: {}, ARROW: {}}}, **problem_responses(PolicyNotCurrent, reads_body=True)},
        openapi_extra=ROLLOUT_BODY,
    )
    async def rollout(request: Request) -> Response:
        """Plays every sample and answers in input order; `Accept: application/x-ndjson` streams each as it finishes.

        `Accept: application/vnd.apache.arrow.stream` brings the same as Arrow.
        """
        body = await read_body(request, rollouts.limits.max_body_bytes)
        rollout_request = await read_request(body, request.headers.get("content-type", ""))
        running = await rollouts.rollout(rollout_request, uuid4().hex, len(body))
        accepted = request.headers.get("accept", "")
        if NDJSON in accepted:
            return StreamingResponse(ndjson_lines(running), media_type=NDJSON)
        return await whole_response(running, ArrowResponseEncoder() if ARROW in accepted else JsonResponseEncoder())

    return routes


async def read_request(body: bytearray, content_type: str) -> RolloutRequest:
    """Raises `RequestProblem` if the body is no request, whatever is wrong with it."""
    is_arrow = content_type.lower().startswith(ARROW)
    read = arrow_request if is_arrow else partial(RolloutRequest.model_validate_json, strict=True)
    try:
        return read(body) if len(body) <= MOST_BYTES_INLINE else await asyncio.to_thread(read, body)
    except ValidationError as error:
        raise problem_of(error) from error


async def whole_response(running: RunningRollout, encoder: ResponseEncoder) -> Response:
    """Begins when the last sample has ended: until then it can still become a problem document."""
    all_tokens = 0
    try:
        async with aclosing(running) as ended:
            async for position, result in ended:
                await beside_others(result, partial(encoder.add, position, result))
                all_tokens += tokens_in(result)
    except SampleFailed as failed:
        raise sample_failed(failed) from failed
    pieces = encoder.body(running.summary)
    if all_tokens <= MOST_TOKENS_INLINE:
        return Response(b"".join(pieces), media_type=encoder.media_type)
    # What can fail fails with the first piece, before the status is sent. Starlette asks for the others in threads too.
    first = await asyncio.to_thread(next, pieces)
    # Serve's proxy carries bytes and nothing else.
    return StreamingResponse(map(bytes, chain([first], pieces)), media_type=encoder.media_type)


def tokens_in(result: SampleResult) -> int:
    return sum(len(message.token_ids) for message in result.message_log)


async def beside_others(result: SampleResult, encode: Callable[[], Encoded]) -> Encoded:
    """Encodes one sample without keeping everybody else's waiting for more than a small one."""
    if tokens_in(result) > MOST_TOKENS_INLINE:
        return await asyncio.to_thread(encode)
    await asyncio.sleep(0)
    return encode()


async def ndjson_lines(running: RunningRollout) -> AsyncIterator[bytes]:
    """One line `{"position", "sample"}` for each sample the moment it ends, then one `{"summary"}` or `{"problem"}`."""
    try:
        async with aclosing(running) as ended:
            async for position, result in ended:
                sample = await beside_others(result, partial(json_of, result))
                yield b'{"position":%d,"sample":%s}\n' % (position, sample)
        yield b'{"summary":%s}\n' % json_of(running.summary)
    except SampleFailed as failed:
        yield b'{"problem":%s}\n' % json_of(sample_failed(failed).problem)
    except Exception as error:  # noqa: BLE001 - the status is sent already: only a line can still tell
        yield b'{"problem":%s}\n' % json_of(internal_error(error))


def sample_failed(failed: SampleFailed) -> RequestProblem:
    return RequestProblem(
        502,
        "sample-failed",
        "A sample failed, and the request said on_error: fail",
        [FieldProblem(field=f"samples[{failed.sample_position}]", message=str(failed), value=failed.kind)],
    )
