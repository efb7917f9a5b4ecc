"""Errors of a whole request, as RFC 9457 problem documents that name the field, the value and what to do."""

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from deployments.failures import RolloutFailure
from deployments.policy.failures import PolicyFailure
from rollout_client.problem_contract import FieldProblem, Problem

PROBLEM_JSON = "application/problem+json"
LONGEST_SHOWN_VALUE = 200
RETRY_AFTER_S = 2
MOST_PROBLEMS = 20


class RequestProblem(Exception):
    """Ends a request with its problem document."""

    def __init__(self, status: int, type_: str, title: str, errors: Sequence[FieldProblem]) -> None:
        detail = " ".join(
            f"{error.field}: {error.message}." if error.field else f"{error.message}." for error in errors
        )
        super().__init__(detail)
        self.problem = Problem(
            type=f"urn:rollout:problem:{type_}", title=title, status=status, detail=detail, errors=list(errors)
        )


def invalid_request(*errors: FieldProblem) -> RequestProblem:
    return RequestProblem(422, "invalid-request", "The request is not valid; nothing was started", errors)


def unknown_task(field: str, task_name: str, known: Iterable[str]) -> FieldProblem:
    return FieldProblem(
        field=field,
        message=f"there is no task {task_name!r}; the known ones are {', '.join(sorted(known))}",
        value=task_name,
    )


def unreadable_body(message: str) -> RequestProblem:
    return RequestProblem(
        400,
        "unreadable-body",
        "The request body cannot be read; nothing was started",
        [FieldProblem(field="body", message=message)],
    )


def policy_problem(failure: PolicyFailure) -> RequestProblem:
    return RequestProblem(failure.status, failure.name, failure.title, failure.problems)


def problem_responses(*failures: type[PolicyFailure], reads_body: bool = False) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI page: each status that a call can be refused with, and why."""
    titles: dict[int | str, list[str]] = {422: ["The request is not valid"]}
    if reads_body:
        titles[400] = ["The body cannot be read"]
    for failure in failures:
        titles.setdefault(failure.status, []).append(failure.title)
    return {
        status: {"content": {PROBLEM_JSON: {"schema": Problem.model_json_schema()}}, "description": "; ".join(said)}
        for status, said in titles.items()
    }


def not_ready(message: str) -> RequestProblem:
    return RequestProblem(
        503,
        "not-ready",
        "The service cannot serve rollouts now",
        [FieldProblem(field="", message=message.removesuffix("."))],
    )


def internal_error(error: Exception) -> Problem:
    return RequestProblem(
        500,
        "internal",
        "The service failed",
        [FieldProblem(field="", message=f"{type(error).__name__}: {error}")],
    ).problem


def problem_of(error: ValidationError) -> RequestProblem:
    """Turns pydantic's findings into a problem; a body that is no JSON is 400, everything else 422."""
    findings = error.errors(include_url=False)
    if findings[0]["type"] == "json_invalid":
        return unreadable_body(f"{findings[0]['msg']}; send one JSON object")
    problems = [field_problem(finding) for finding in findings[:MOST_PROBLEMS]]
    if len(findings) > MOST_PROBLEMS:
        message = f"{len(findings) - MOST_PROBLEMS} more are wrong in the same request"
        problems.append(FieldProblem(field="body", message=message))
    return invalid_request(*problems)


def field_problem(finding: ErrorDetails) -> FieldProblem:
    message = finding["msg"].removeprefix("Value error, ")
    if finding["type"] == "extra_forbidden":
        message = "this field is not known; remove it or check its spelling against /docs"
    return FieldProblem(field=dotted(finding["loc"]), message=message, value=shown(finding["input"]))


def dotted(location: Sequence[str | int]) -> str:
    """`("samples", 0, "task_name")` as `samples[0].task_name`."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".") or "body"


def shown(value: Any) -> Any:
    """The offending value, if it is short enough to help."""
    text = str(value)
    if len(text) > LONGEST_SHOWN_VALUE:
        return f"{text[:LONGEST_SHOWN_VALUE]}..."
    return value if isinstance(value, str | int | bool | None) else text


def install_problem_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestProblem)
    async def on_request_problem(_request: Request, error: RequestProblem) -> Response:
        return problem_response(error.problem)

    @app.exception_handler(PolicyFailure)
    async def on_policy_failure(_request: Request, failure: PolicyFailure) -> Response:
        return problem_response(policy_problem(failure).problem)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_parameters(_request: Request, error: RequestValidationError) -> Response:
        return problem_response(invalid_request(*(field_problem(finding) for finding in error.errors())).problem)

    @app.exception_handler(RolloutFailure)
    async def on_rollout_failure(_request: Request, failure: RolloutFailure) -> Response:
        return problem_response(not_ready(str(failure)).problem, {"retry-after": str(RETRY_AFTER_S)})

    @app.exception_handler(Exception)
    async def on_anything_else(_request: Request, error: Exception) -> Response:
        return problem_response(internal_error(error))

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        problem = Problem(
            type="about:blank",
            title=str(error.detail),
            status=error.status_code,
            detail=f"{request.method} {request.url.path}: {error.detail}. The routes are listed at /docs.",
        )
        return problem_response(problem, headers=dict(error.headers or {}))


def problem_response(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    return Response(problem.model_dump_json(), problem.status, headers, media_type=PROBLEM_JSON)
