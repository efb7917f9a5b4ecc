"""Errors of a whole request, as problem documents of RFC 9457 that name the field, its value and what to do."""

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi.responses import Response
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from deployments.policy.failures import PolicyFailure
from rollout_client.problem_contract import FieldProblem, Problem

PROBLEM_JSON = "application/problem+json"
REQUEST_ID_HEADER = "X-Request-ID"
TYPE_PREFIX = "urn:rollout:problem:"
LONGEST_SHOWN_VALUE = 200
MOST_PROBLEMS = 20


class RequestProblem(Exception):
    """Ends a request with its problem document."""

    def __init__(self, status: int, type_: str, title: str, errors: Sequence[FieldProblem]) -> None:
        """`type_` is the last part of the document's `type`."""
        detail = " ".join(
            f"{error.field}: {error.message}." if error.field else f"{error.message}." for error in errors
        )
        super().__init__(detail)
        self.problem = Problem(
            type=f"{TYPE_PREFIX}{type_}", title=title, status=status, detail=detail, errors=list(errors)
        )


def invalid_request(*errors: FieldProblem) -> RequestProblem:
    """422: the request was read, and its fields are at fault."""
    return RequestProblem(422, "invalid-request", "The request is not valid; nothing was started", errors)


def unreadable_body(message: str) -> RequestProblem:
    """400: the bytes of the body are not what its headers say."""
    return RequestProblem(
        400,
        "unreadable-body",
        "The request body cannot be read; nothing was started",
        [FieldProblem(field="body", message=message)],
    )


def body_too_large(message: str) -> RequestProblem:
    """413: the body is over a limit of the service."""
    return RequestProblem(
        413,
        "body-too-large",
        "The request body is too large; nothing was started",
        [FieldProblem(field="body", message=message)],
    )


def unsupported_media_type(header: str, value: str, supported: Iterable[str]) -> RequestProblem:
    """415: the service does not read bodies of this `Content-Type` or `Content-Encoding`."""
    message = f"{value!r} is not supported; send {' or '.join(supported)}"
    return RequestProblem(
        415,
        "unsupported-media-type",
        "The request body has an unsupported type or encoding; nothing was started",
        [FieldProblem(field=header, message=message, value=value)],
    )


def task_not_found(task_name: str, known: Iterable[str]) -> RequestProblem:
    """404: the path names a task that the service does not have."""
    return RequestProblem(404, "task-unknown", "The task is not known", [unknown_task("task_name", task_name, known)])


def unknown_task(field: str, task_name: str, known: Iterable[str]) -> FieldProblem:
    return FieldProblem(
        field=field,
        message=f"there is no task {task_name!r}; the known ones are {', '.join(sorted(known))}",
        value=task_name,
    )


def policy_problem(failure: PolicyFailure) -> RequestProblem:
    """The policy store refused the call."""
    return RequestProblem(failure.status, failure.name, failure.title, failure.problems)


def not_ready(message: str) -> RequestProblem:
    """503: a deployment that the request needs does not answer; trying again can help."""
    return RequestProblem(
        503,
        "not-ready",
        "The service cannot serve rollouts now",
        [FieldProblem(field="", message=message.removesuffix("."))],
    )


def internal_error(error: Exception) -> RequestProblem:
    """500: an exception that nobody expected."""
    return RequestProblem(
        500,
        "internal",
        "The service failed",
        [FieldProblem(field="", message=f"{type(error).__name__}: {error}")],
    )


def validation_problem(error: ValidationError) -> RequestProblem:
    """The problem that pydantic found: 400 for a body that is not JSON, otherwise 422."""
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
    """`("samples", 0, "task_name")` as `samples[0].task_name`; the empty location is `body`."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".") or "body"


def shown(value: Any) -> Any:
    """The offending value as a JSON scalar, cut to `LONGEST_SHOWN_VALUE` characters."""
    text = str(value)
    if len(text) > LONGEST_SHOWN_VALUE:
        return f"{text[:LONGEST_SHOWN_VALUE]}..."
    return value if isinstance(value, str | int | bool | None) else text


def problem_response(problem: Problem, request_id: str, headers: dict[str, str] | None = None) -> Response:
    """The response with `problem`, which gets the id of its request."""
    document = problem.model_copy(update={"request_id": request_id})
    return Response(document.model_dump_json(), problem.status, headers, media_type=PROBLEM_JSON)
