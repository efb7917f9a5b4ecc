"""The contract of errors: every route answers a refused or failed request with a problem document of RFC 9457."""

from pydantic import Field, JsonValue

from rollout_client.contract.base import Lenient


class FieldProblem(Lenient):
    """One thing that is wrong with a request."""

    field: str
    """Path of the field, such as `samples[0].task_name`; empty for a problem that is not of one field."""
    message: str
    """The problem, and what to do about it."""
    value: JsonValue = None
    """The offending value, shortened if it is long."""


class Problem(Lenient):
    """An error of a whole request, as a problem document of RFC 9457 (`application/problem+json`)."""

    type: str
    """URI of the kind of error: `urn:rollout:problem:` and a name, or `about:blank`."""
    title: str
    """The kind of error in words."""
    status: int
    """The HTTP status."""
    detail: str
    """The problem as text."""
    errors: list[FieldProblem] = Field(default_factory=list)
    """The problem field by field."""
    request_id: str | None = None
    """The request's `X-Request-ID`, or the id that the service gave it: it is in the service's logs too."""
