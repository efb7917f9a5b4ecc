"""The HTTP face: routes, bodies, problem documents. What a rollout is stands elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ValidationError

from deployments.policy_failures import PolicyNotCurrent
from rollout_client.contract import (
    FieldProblem,
    RolloutRequest,
    RolloutResponse,
    SampleInput,
    TaskInfo,
)
from service.policy_http import policy_routes
from service.problems import (
    RequestProblem,
    install_problem_handlers,
    internal_error,
    invalid_request,
    problem_of,
    problem_responses,
    unknown_task,
    unreadable_body,
)
from service.rollout_service import RolloutService, SampleFailed, StartedRollout

JSON = "application/json"
NDJSON = "application/x-ndjson"
ROLLOUT_BODY = {
    "requestBody": {"required": True, "content": {JSON: {"schema": {"$ref": "#/components/schemas/RolloutRequest"}}}}
}


def build_http_app(rollouts: RolloutService) -> FastAPI:
    app = FastAPI(title="Rollouts", description="The current policy plays prompts against environments.")
    install_problem_handlers(app)
    describe_request_body(app)

    @app.post(
        "/rollout",
        response_model=RolloutResponse,
        responses=problem_responses(PolicyNotCurrent, reads_body=True),
        openapi_extra=ROLLOUT_BODY,
    )
    async def rollout(request: Request) -> Response:
        """Plays every sample and answers in input order; `Accept: application/x-ndjson` streams each as it finishes."""
        body = await read_body(request, rollouts.limits.max_body_bytes)
        try:
            rollout_request = RolloutRequest.model_validate_json(body, strict=True)
        except ValidationError as error:
            raise problem_of(error) from error
        # Long prompts take the tokenizer seconds, during which everybody else's rollouts go on.
        started = await asyncio.to_thread(rollouts.start, rollout_request)
        await rollouts.policy.meet(rollout_request.policy)
        if NDJSON in request.headers.get("accept", ""):
            return StreamingResponse(ndjson_lines(rollouts, started), media_type=NDJSON)
        try:
            response = await rollouts.response(started)
        except SampleFailed as failed:
            raise sample_failed(failed) from failed
        return Response(json_of(response), media_type=JSON)

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


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    """Raises `RequestProblem` as soon as the body is known to be larger than `max_body_bytes`."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise unreadable_body("it is compressed, which this service does not read yet; send it as it is")
    too_large = unreadable_body(f"larger than the limit of {max_body_bytes} bytes; split the request")
    if int(request.headers.get("content-length", 0)) > max_body_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_body_bytes:
            raise too_large
    return bytes(body)


async def ndjson_lines(rollouts: RolloutService, started: StartedRollout) -> AsyncIterator[bytes]:
    """One line `{"position", "sample"}` for each sample the moment it ends, then one `{"summary"}` or `{"problem"}`."""
    try:
        async with aclosing(rollouts.play(started)) as finished:
            async for position, result in finished:
                yield b'{"position":%d,"sample":%s}\n' % (position, json_of(result))
        yield b'{"summary":%s}\n' % json_of(rollouts.summary_of(started))
    except SampleFailed as failed:
        yield b'{"problem":%s}\n' % json_of(sample_failed(failed).problem)
    except Exception as error:  # noqa: BLE001 - the status is sent already: only a line can still tell
        yield b'{"problem":%s}\n' % json_of(internal_error(error))


def json_of(model: BaseModel) -> bytes:
    """Only what was set: a further field that came as null goes back as null, and none appears by itself."""
    return model.model_dump_json(exclude_unset=True).encode()


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
