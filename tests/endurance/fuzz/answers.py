"""What every answer of the service must be like, whatever was sent. No I/O."""

import re
from collections.abc import Iterator
from typing import Any

import orjson

SERVER_FAILED = 500
"""Statuses from here on are the service's fault, but for those of `FORESEEN`."""
FORESEEN = {501: {"sessions-not-configured", "images-not-configured"}, 502: {"sample-failed"}, 503: {"not-ready"}}
"""By status, the types of problem that alone may have it."""
INVALID = 422
TRACES = re.compile(
    rb"Traceback \(most recent call last\)"
    rb'|File \\?"[^"\\]+\\?", line \d+'
    rb"|(?<!\w)/(?:usr|home|root|tmp|opt|var|proc|work)/[\w.-]+"
)
"""A traceback of Python, or an absolute path of this machine."""
PROBLEM_PREFIX = "urn:rollout:problem:"
SHOWN = 200


def answer_problems(status: int, body: bytes, sent: bytes = b"") -> Iterator[str]:
    """One text for each rule that the answer breaks.

    Args:
        sent: the request, whose own paths may come back in a message that names them.
    """
    if status >= SERVER_FAILED and problem_name(body) not in FORESEEN.get(status, ()):
        yield f"status {status}: {body[:SHOWN]!r}"
    for leak in TRACES.finditer(body):
        if leak[0] not in sent:
            yield f"status {status}: the answer holds {leak[0][:SHOWN]!r}"
            break
    if status == INVALID and not names_its_fields(body):
        yield f"status 422 without the name of a field: {body[:SHOWN]!r}"


def problem_name(body: bytes) -> str | None:
    """The last part of the `type` of a problem document; `None` for anything else."""
    document = object_in(body)
    kind = document.get("type")
    return kind.removeprefix(PROBLEM_PREFIX) if isinstance(kind, str) else None


def names_its_fields(body: bytes) -> bool:
    errors = object_in(body).get("errors")
    return isinstance(errors, list) and bool(errors) and all(error.get("field") for error in errors)


def object_in(body: bytes) -> dict[str, Any]:
    """The JSON object that the body is; an empty one if it is anything else."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}
