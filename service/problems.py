"""Errors of a whole request, as problem documents of RFC 9457 that name the field, its value and what to do."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from deployments.failures import RolloutFailure, StoreFailure
from rollout_client.contract.base import FieldProblem, Problem

PROBLEM_JSON = "application/problem+json"
REQUEST_ID_HEADER = "X-Request-ID"
TYPE_PREFIX = "urn:rollout:problem:"
_LONGEST_SHOWN_VALUE = 200
MOST_PROBLEMS = 20
_JSON_WORDS = {
    "extra_forbidden": "this field is not known; remove it or check its spelling against /docs",
    "model_type": "Input should be an object",
    "model_attributes_type": "Input should be an object",
    "dict_type": "Input should be an object",
    "list_type": "Input should be a valid array",
}
"""Messages by pydantic's type of error. Pydantic's own speak of Python, if the body was parsed before."""
_NOT_READY_RETRY_AFTER_S = 2
_NO_HEADERS: Mapping[str, str] = {}
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ProblemType:
    """One kind of problem document. Those of stores are named by the classes of their `failures.py`."""

    name: str
    """The last part of the document's `type`."""
    status: int
    title: str


NOT_AUTHENTICATED = ProblemType("not-authenticated", 401, "The request carries no valid key; nothing was started")
NOT_ALLOWED = ProblemType("not-allowed", 403, "The request is not allowed; nothing was started")
INVALID_REQUEST = ProblemType("invalid-request", 422, "The request is not valid; nothing was started")
UNREADABLE_BODY = ProblemType("unreadable-body", 400, "The request body cannot be read; nothing was started")
BODY_TOO_LARGE = ProblemType("body-too-large", 413, "The request body is too large; nothing was started")
BODY_STALLED = ProblemType("body-stalled", 408, "The request body stopped arriving; nothing was started")
UNSUPPORTED_MEDIA_TYPE = ProblemType(
    "unsupported-media-type", 415, "The request body has an unsupported type or encoding; nothing was started"
)
TASK_UNKNOWN = ProblemType("task-unknown", 404, "The task is not known")
OVERLOADED = ProblemType("overloaded", 429, "The service is full; nothing was started")
QUOTA_EXCEEDED = ProblemType("quota-exceeded", 429, "The key has used up a quota; nothing was started")
SAMPLE_FAILED = ProblemType("sample-failed", 502, "A sample failed, and the request said on_error: fail")
NOT_READY = ProblemType("not-ready", 503, "The service cannot serve rollouts now")
FUTURE_LOST = ProblemType("future-lost", 410, "The answer is not kept here, or its work is to be started again")
NOT_TRAINED_HERE = ProblemType("not-trained-here", 404, "The service has no such call of Tinker's API")
INTERNAL = ProblemType("internal", 500, "The service failed")


class RequestProblem(Exception):
    """Ends a request with its problem document."""

    def __init__(
        self, type_: ProblemType, errors: Sequence[FieldProblem], headers: Mapping[str, str] = _NO_HEADERS
    ) -> None:
        """`headers` are those of the response."""
        said = " ".join(f"{error.field}: {error.message}." if error.field else f"{error.message}." for error in errors)
        super().__init__(said)
        self._type = type_
        self.problem = Problem(
            type=f"{TYPE_PREFIX}{type_.name}", title=type_.title, status=type_.status, detail=said, errors=list(errors)
        )
        self.headers = headers

    def __reduce__(self) -> tuple[type["RequestProblem"], tuple[Any, ...]]:
        # For the process that parses large bodies: an exception is pickled with its message alone.
        return RequestProblem, (self._type, self.problem.errors, self.headers)


def invalid_request(*errors: FieldProblem) -> RequestProblem:
    return RequestProblem(INVALID_REQUEST, errors)


def unreadable_body(message: str) -> RequestProblem:
    return RequestProblem(UNREADABLE_BODY, [FieldProblem(field="body", message=message)])


def body_too_large(message: str) -> RequestProblem:
    return RequestProblem(BODY_TOO_LARGE, [FieldProblem(field="body", message=message)])


def unsupported_media_type(header: str, value: str, supported: Iterable[str]) -> RequestProblem:
    message = f"{value!r} is not supported; send {' or '.join(supported)}"
    return RequestProblem(UNSUPPORTED_MEDIA_TYPE, [FieldProblem(field=header, message=message, value=value)])


def unknown_task(field: str, task_name: str, known: Iterable[str]) -> FieldProblem:
    return FieldProblem(
        field=field,
        message=f"there is no task {task_name!r}; the known ones are {', '.join(sorted(known))}",
        value=task_name,
    )


def unknown_token(field: str, token_ids: Sequence[int], vocab_size: int) -> FieldProblem | None:
    """The problem of the largest or the smallest id, if that is not one of the model."""
    for found in (max(token_ids, default=0), min(token_ids, default=0)):
        if not 0 <= found < vocab_size:
            message = f"{found} is not a token of the model; its ids are 0 to {vocab_size - 1}"
            return FieldProblem(field=f"{field}[{token_ids.index(found)}]", message=message, value=found)
    return None


def _store_problem(failure: StoreFailure) -> RequestProblem:
    """A store refused the call."""
    headers = _NO_HEADERS if failure.retry_after_s is None else {"Retry-After": str(failure.retry_after_s)}
    return RequestProblem(ProblemType(failure.name, failure.status, failure.title), failure.problems, headers)


def refused_for_now(type_: ProblemType, message: str, retry_after_s: int) -> RequestProblem:
    return RequestProblem(type_, [FieldProblem(field="", message=message)], headers={"Retry-After": str(retry_after_s)})


def not_ready(message: str) -> RequestProblem:
    return refused_for_now(NOT_READY, message.removesuffix("."), _NOT_READY_RETRY_AFTER_S)


def internal_error(error: Exception) -> RequestProblem:
    """Names the exception's type alone: its message could hold a path, or a part of the data."""
    message = f"{type(error).__name__}: the service's log has the message and the traceback under the request's id"
    return RequestProblem(INTERNAL, [FieldProblem(field="", message=message)])


def problem_of(error: Exception) -> RequestProblem:
    """The problem document for an exception that ends a request, or a part of one."""
    match error:
        case RequestProblem():
            return error
        case StoreFailure():
            return _store_problem(error)
        case RolloutFailure():
            return not_ready(str(error))
    return internal_error(error)


def validation_problem(error: ValidationError) -> RequestProblem:
    """The problem that pydantic found: 400 for a body that is not JSON, otherwise 422."""
    findings = error.errors(include_url=False)
    if findings[0]["type"] == "json_invalid":
        return _invalid_json(findings[0]["msg"].removeprefix("Invalid JSON: "))
    return found_problem(findings)


def found_problem(findings: Sequence[ErrorDetails]) -> RequestProblem:
    """Names the first `MOST_PROBLEMS` of `findings`."""
    return invalid_request(*map(field_problem, findings[:MOST_PROBLEMS]))


def parsed_json(body: bytes | bytearray) -> Any:
    """The value of a JSON body. Raises `RequestProblem`: 400, it is not JSON, which knows neither NaN nor infinity."""
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise _invalid_json(str(error)) from error


def parsed_model(body: bytes | bytearray, model: type[Model]) -> Model:
    """The JSON body as `model`. Raises `RequestProblem`: 400, it is not JSON; 422, fields are wrong."""
    try:
        return model.model_validate(parsed_json(body), strict=True)
    except ValidationError as error:
        raise validation_problem(error) from error


def _invalid_json(message: str) -> RequestProblem:
    return unreadable_body(f"Invalid JSON: {message}; send one JSON object")


def field_problem(finding: ErrorDetails) -> FieldProblem:
    message = _JSON_WORDS.get(finding["type"], finding["msg"].removeprefix("Value error, "))
    return FieldProblem(field=dotted(finding["loc"]), message=message, value=shown(finding["input"]))


def dotted(location: Sequence[str | int]) -> str:
    """`("samples", 0, "task_name")` as `samples[0].task_name`; the empty location is `body`."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".") or "body"


def shown(value: Any) -> Any:
    """The offending value as a JSON scalar, cut to `_LONGEST_SHOWN_VALUE` characters."""
    text = value if isinstance(value, str) else str(_beginning(value))
    if len(text) > _LONGEST_SHOWN_VALUE:
        return f"{text[:_LONGEST_SHOWN_VALUE]}..."
    return value if isinstance(value, str | int | bool | None) else text


def _beginning(value: Any) -> Any:
    """The part of a large value that can be shown: the text of 15 MB of JSON takes a second."""
    if isinstance(value, list):
        return value[:_LONGEST_SHOWN_VALUE]
    return dict(islice(value.items(), _LONGEST_SHOWN_VALUE)) if isinstance(value, dict) else value
