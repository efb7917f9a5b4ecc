"""Errors that a call raises: one tree under `RolloutError`, named by whose fault it is and what to do about it.

Each `str()` is a sentence, or a list of what is wrong field by field. A sample that failed raises none of these: it is
returned as data, with `status: error`. `needed_for` tells which extra installs a missing package.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.client import responses
from typing import Any

from pydantic import ValidationError

from rollout_client.contract.base import FieldProblem, Problem


@contextmanager
def needed_for(what: str, extra: str) -> Iterator[None]:
    """Around an import. Raises `ModuleNotFoundError` with the extra that installs the missing package."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ModuleNotFoundError(f'{what} needs {package}: pip install "rollout-client[{extra}]"') from error


MOST_SHOWN_FIELDS = 10
LONGEST_SHOWN_TEXT = 300


class RolloutError(Exception):
    """Base of the errors of a call."""


class ServiceUnreachable(RolloutError):
    """No response began: nothing listens there, the connection broke first, or the service did not get ready."""

    def __init__(self, message: str, may_have_arrived: bool = True) -> None:
        super().__init__(message)
        self.may_have_arrived = may_have_arrived
        """Whether the request may have reached the service; False where no connection was made."""


class RolloutTimeout(RolloutError):
    """The response was not complete within `timeout_s`."""


class StreamBroken(RolloutError):
    """The response began and its connection broke. Samples that had arrived are good."""


class ResponseNotUnderstood(RolloutError):
    """The response does not follow the contract."""


class UploadLost(RolloutError):
    """The service no longer has the chunks of an upload that it had received, and they cannot be sent again."""


class WeightsDiffer(RolloutError):
    """The service holds other weights than were pushed: their checksums differ."""


class TokenizerDiffers(RolloutError):
    """A trainer's tokenizer makes other tokens than the service's."""

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__(f"The tokenizer is not the service's: {'; '.join(differences)}.")
        self.differences = list(differences)
        """One sentence for each thing that differs."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.differences,)


class ContractDiffers(RolloutError):
    """Client and service speak different major versions of the contract; one of them must be changed."""


class NotJson(ValueError):
    """A request holds a value that JSON does not have; nothing was sent."""

    def __init__(self, field: str, shown: str, kind: str, sample: int | None = None) -> None:
        super().__init__(
            f"{field or 'the value'}: a value of type {kind} cannot be sent as JSON (got {shown}). Send "
            "texts, numbers, booleans, null, and lists and objects of them. Numbers and arrays of numpy and torch are "
            "sent as numbers and lists."
        )
        self.field = field
        """Where the value is, as in `samples[3].extra_env_info.seed`."""
        self.sample = sample
        """Index of its sample in the input; `None` outside of the samples."""
        self._given = (field, shown, kind, sample)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given


class StatusError(RolloutError):
    """The service, or a proxy before it, answered with an error status."""

    def __init__(self, problem: Problem, retry_after_s: float | None = None) -> None:
        super().__init__(sentence(problem))
        self.problem = problem
        """The problem document; `problem.errors` has each field and its value."""
        self.retry_after_s = retry_after_s
        """Seconds that the service asks to wait before the next attempt."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem, self.retry_after_s)

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.problem.status

    @property
    def request_id(self) -> str | None:
        """The id of the request in the service's logs, where the response has one."""
        return self.problem.request_id


class RequestRejected(StatusError):
    """The request is at fault (4xx): sent again unchanged it fails again, but for 408, 425 and 429."""


class ServiceFailed(StatusError):
    """The service is at fault (5xx)."""


def sentence(problem: Problem) -> str:
    """`problem` in words: its title, then its detail, or field by field what is wrong, with which value."""
    head = f"{problem.title} ({problem.status})"
    findings = [field_sentence(error) for error in problem.errors[:MOST_SHOWN_FIELDS]]
    if hidden := len(problem.errors) - len(findings):
        findings.append(f"and {hidden} more")
    request = "" if problem.request_id is None else f"request id {problem.request_id}"
    if len(findings) > 1:
        return "\n  - ".join(filter(None, [f"{head}:", *findings, request]))
    text = ": ".join(filter(None, [head, *(findings or [problem.detail])]))
    return f"{text} ({request})" if request else text


def field_sentence(error: FieldProblem) -> str:
    place = f"{error.field}: " if error.field else ""
    value = "" if error.value is None else f" (got {shortened(repr(error.value))})"
    return f"{place}{error.message}{value}"


def error_of_problem(problem: Problem, retry_after_s: float | None = None) -> StatusError:
    if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ServiceFailed(problem, retry_after_s)
    return RequestRejected(problem, retry_after_s)


def error_of_response(status: int, headers: Mapping[str, str], body: bytes) -> StatusError:
    """The error of a response with an error status, whether it has a problem document or a proxy's own text."""
    try:
        problem = Problem.model_validate_json(body)
    except ValidationError:
        problem = Problem(
            type="about:blank",
            title=responses.get(status, "Unknown status"),
            status=status,
            detail=shortened(body.decode(errors="replace").strip()),
        )
    if problem.request_id is None:
        problem.request_id = headers.get("x-request-id")
    return error_of_problem(problem, seconds_until(headers.get("retry-after")))


def not_understood(what: str, error: ValidationError) -> ResponseNotUnderstood:
    finding = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in finding["loc"])
    return ResponseNotUnderstood(
        f"{what} is not what this client knows{f' at {place}' if place else ''}: {finding['msg']}. "
        "Check that the URL is a rollout service's and that client and service have matching versions."
    )


def seconds_until(retry_after: str | None) -> float | None:
    """The seconds of a Retry-After header. `None` without one, and for a date, which a proxy's clock would say."""
    return float(retry_after) if retry_after is not None and retry_after.strip().isdecimal() else None


def shortened(text: str, longest: int = LONGEST_SHOWN_TEXT) -> str:
    return text if len(text) <= longest else f"{text[:longest]}..."
