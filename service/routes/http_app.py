"""The HTTP face: routes, bodies, problem documents. What a rollout is stands elsewhere."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import ValidationError

from deployments.policy.failures import PolicyNotCurrent
from rollout_client.arrow.schema import ARROW
from rollout_client.contract import (
    FieldProblem,
    RolloutRequest,
    RolloutResponse,
    RolloutSummary,
    SampleInput,
    SampleResult,
    TaskInfo,
)
from service.requests.arrow_body import arrow_request
from service.requests.body import read_body
from service.responses.arrow_encoder import ArrowResponseEncoder
from service.responses.json_encoder import JSON, JsonResponseEncoder, json_of
from service.responses.problems import (
    RequestProblem,
    install_problem_handlers,
    internal_error,
    invalid_request,
    problem_of,
    problem_responses,
    unknown_task,
)
from service.rollout_service import RolloutService, SampleFailed, StartedRollout
from service.routes.policy import policy_routes

NDJSON = "application/x-ndjson"
MOST_BYTES_INLINE = 2**16
"""Reading so many takes most of a millisecond, several times what the way to a thread and back costs."""
MOST_BYTES_STARTED_INLINE = 2**12
MOST_GENERATIONS_STARTED_INLINE = 16
"""Rendering and tokenizing so much takes a millisecond or two."""
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


class Answer(Protocol):
    """Takes the samples of a request as they end, then has the bytes of the whole answer."""

    media_type: str

    def add(self, position: int, result: SampleResult) -> None: ...

    def body(self, summary: RolloutSummary) -> Iterator[bytes | memoryview]: ...


def build_http_app(rollouts: RolloutService) -> FastAPI:
    app = FastAPI(title="Rollouts", description="The current policy plays prompts against environments.")
    install_problem_handlers(app)
    describe_request_body(app)

    @app.post(
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
        started = await start(rollouts, rollout_request, len(body))
        await rollouts.policy.wait_for_version(rollout_request.policy)
        accepted = request.headers.get("accept", "")
        if NDJSON in accepted:
            return StreamingResponse(ndjson_lines(rollouts, started), media_type=NDJSON)
        return await whole_answer(
            rollouts, started, ArrowResponseEncoder() if ARROW in accepted else JsonResponseEncoder()
        )

    @app.get("/tasks", response_model_exclude_unset=True)
    async def tasks() -> dict[str, list[TaskInfo]]:
        """The environments, the fields they need, and a sample of each that can be posted as it is."""
        return {"tasks": await rollouts.tasks()}

    @app.get("/tasks/{task_name}/samples", responses=problem_responses(), response_model_exclude_unset=True)
    async def example_samples(
        task_name: str,
        count: Annotated[int, Query(ge=1, le=10_000)] = 8,
        seed: Annotated[int, Query(ge=0)] = 0,
    ) -> dict[str, list[SampleInput]]:
        """Samples of a task, ready to post; equal seeds give equal samples."""
        if task_name not in rollouts.environments:
            raise invalid_request(unknown_task("task_name", task_name, rollouts.environments))
        return {"samples": await rollouts.example_samples(task_name, count, seed)}

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """This process is alive."""
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        """Rollouts can be served: generator and environments answer."""
        await rollouts.check_ready()
        return {"status": "ready"}

    app.include_router(policy_routes(rollouts.policy.store))
    return app


async def read_request(body: bytearray, content_type: str) -> RolloutRequest:
    """Raises `RequestProblem` if the body is no request, whatever is wrong with it."""
    is_arrow = content_type.lower().startswith(ARROW)
    read = arrow_request if is_arrow else partial(RolloutRequest.model_validate_json, strict=True)
    try:
        return read(body) if len(body) <= MOST_BYTES_INLINE else await asyncio.to_thread(read, body)
    except ValidationError as error:
        raise problem_of(error) from error


async def start(rollouts: RolloutService, request: RolloutRequest, body_bytes: int) -> StartedRollout:
    """Raises `RequestProblem`. Long prompts take the tokenizer seconds: everybody else's rollouts go on meanwhile."""
    if body_bytes <= MOST_BYTES_STARTED_INLINE and request.num_generations <= MOST_GENERATIONS_STARTED_INLINE:
        return rollouts.start(request)
    return await asyncio.to_thread(rollouts.start, request)


async def whole_answer(rollouts: RolloutService, started: StartedRollout, answer: Answer) -> Response:
    """Begins when the last sample has ended: until then it can still become a problem document."""
    all_tokens = 0
    try:
        async with aclosing(rollouts.play(started)) as finished:
            async for position, result in finished:
                await beside_others(result, partial(answer.add, position, result))
                all_tokens += tokens_in(result)
    except SampleFailed as failed:
        raise sample_failed(failed) from failed
    pieces = answer.body(rollouts.summary_of(started))
    if all_tokens <= MOST_TOKENS_INLINE:
        return Response(b"".join(pieces), media_type=answer.media_type)
    # What can fail fails with the first piece, before the status is sent. Starlette asks for the others in threads too.
    first = await asyncio.to_thread(next, pieces)
    # Serve's proxy carries bytes and nothing else.
    return StreamingResponse(map(bytes, chain([first], pieces)), media_type=answer.media_type)


def tokens_in(result: SampleResult) -> int:
    return sum(len(message.token_ids) for message in result.message_log)


async def beside_others(result: SampleResult, encode: Callable[[], Encoded]) -> Encoded:
    """Encodes one sample without keeping everybody else's waiting for more than a small one."""
    if tokens_in(result) > MOST_TOKENS_INLINE:
        return await asyncio.to_thread(encode)
    await asyncio.sleep(0)
    return encode()


async def ndjson_lines(rollouts: RolloutService, started: StartedRollout) -> AsyncIterator[bytes]:
    """One line `{"position", "sample"}` for each sample the moment it ends, then one `{"summary"}` or `{"problem"}`."""
    try:
        async with aclosing(rollouts.play(started)) as finished:
            async for position, result in finished:
                sample = await beside_others(result, partial(json_of, result))
                yield b'{"position":%d,"sample":%s}\n' % (position, sample)
        yield b'{"summary":%s}\n' % json_of(rollouts.summary_of(started))
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


def describe_request_body(app: FastAPI) -> None:
    """Puts the request's schema on the OpenAPI page: the route reads its body itself, so FastAPI does not know it."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        schema = original()
        request_schema = RolloutRequest.model_json_schema(ref_template="#/components/schemas/{model}")
        components = schema["components"]["schemas"]
        components.update(request_schema.pop("$defs"))
        components["RolloutRequest"] = request_schema
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
