"""What a call can raise: one tree under `RolloutError`, named by whose fault it is and what to do about it.

Each `str()` is a sentence, or a list of what is wrong field by field. A sample that failed is none of these: it comes
back as data, with `status: error`.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from pydantic import ValidationError

from rollout_client.problem_contract import FieldProblem, Problem

MOST_SHOWN_FIELDS = 10
LONGEST_SHOWN_TEXT = 300


class RolloutError(Exception):
    """Base of everything that the clients raise about a call."""


class ServiceUnreachable(RolloutError):
    """No answer began: nothing listens there, the connection broke first, or the service did not get ready."""


class RolloutTimeout(RolloutError):
    """The answer was not complete within `timeout_s`."""


class StreamBroken(RolloutError):
    """The answer began and broke off. Samples that had arrived are good."""


class AnswerNotUnderstood(RolloutError):
    """The answer came and is not what the contract says."""


class UploadLost(RolloutError):
    """The service no longer has the pieces of an upload that it took, and they cannot be sent once more."""


class WeightsDiffer(RolloutError):
    """The service holds other weights than were pushed: their checksums differ."""


class RequestRejected(RolloutError):
    """The request is at fault (4xx); posting it again unchanged cannot help. `problem.errors` has field and value."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(sentence(problem))
        self.problem = problem


class ServiceFailed(RolloutError):
    """The service is at fault (5xx)."""

    def __init__(self, problem: Problem, retry_after_s: float | None = None) -> None:
        super().__init__(sentence(problem))
        self.problem = problem
        self.retry_after_s = retry_after_s
        """Seconds that the service asks to wait before trying again."""

    @property
    def is_unavailable(self) -> bool:
        """Whether the service said that it took nothing on (503), so that trying again is safe and may help."""
        return self.problem.status == HTTPStatus.SERVICE_UNAVAILABLE


def sentence(problem: Problem) -> str:
    """`problem` in words: its title, then its detail, or field by field what is wrong, with which value."""
    head = f"{problem.title} ({problem.status})"
    findings = [field_sentence(error) for error in problem.errors[:MOST_SHOWN_FIELDS]]
    if hidden := len(problem.errors) - len(findings):
        findings.append(f"and {hidden} more")
    if len(findings) > 1:
        return "\n  - ".join([f"{head}:", *findings])
    return ": ".join(filter(None, [head, *(findings or [problem.detail])]))


def field_sentence(error: FieldProblem) -> str:
    place = f"{error.field}: " if error.field else ""
    value = "" if error.value is None else f" (got {shortened(repr(error.value))})"
    return f"{place}{error.message}{value}"


def error_of_problem(problem: Problem, retry_after_s: float | None = None) -> RequestRejected | ServiceFailed:
    if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ServiceFailed(problem, retry_after_s)
    return RequestRejected(problem)


def error_of_answer(status: int, headers: Mapping[str, str], body: bytes) -> RequestRejected | ServiceFailed:
    """The error of an answer that is no success, whether it carries a problem document or a proxy's own text."""
    try:
        problem = Problem.model_validate_json(body)
    except ValidationError:
        problem = Problem(
            type="about:blank",
            title=reason_phrase(status),
            status=status,
            detail=shortened(body.decode(errors="replace").strip()),
        )
    return error_of_problem(problem, seconds_until(headers.get("retry-after")))


def not_understood(what: str, error: ValidationError) -> AnswerNotUnderstood:
    finding = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in finding["loc"])
    return AnswerNotUnderstood(
        f"{what} is not what this client knows{f' at {place}' if place else ''}: {finding['msg']}. "
        "Check that the URL is a rollout service's and that client and service have matching versions."
    )


def reason_phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown status"


def seconds_until(retry_after: str | None) -> float | None:
    """Reads a Retry-After header, which is a number of seconds or a date; `None` if it is neither."""
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        then = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return max((then - datetime.now(UTC)).total_seconds(), 0.0)


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN_TEXT else f"{text[:LONGEST_SHOWN_TEXT]}..."
