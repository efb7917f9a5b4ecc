"""The error with which a stream of a model server's API ends, in the form that the official clients of the API read.

vLLM's servers end a stream so that has failed midway.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json, to_json

from deployments.serving_records import Endpoint
from rollout_client.problem_contract import Problem

LAST_EVENTS: Mapping[Endpoint, tuple[bytes, ...]] = {
    "chat/completions": (b"data: [DONE]",),
    "messages": (b"event: message_stop",),
    "responses": (b"event: response.completed", b"event: response.incomplete"),
}
SEQUENCE_NUMBER = re.compile(rb'"sequence_number":\s?(\d+)')


def is_closed_by(endpoint: Endpoint, part: bytes) -> bool:
    """Whether a part of a stream has its last event. Within data a line never begins: JSON has no line ends."""
    return any(b"\n" + last in b"\n" + part for last in LAST_EVENTS[endpoint])


def problem_event(endpoint: Endpoint, problem: Problem, after: bytes) -> bytes:
    """Args: `after` is the part of the stream before it; empty if it is the first."""
    numbers = SEQUENCE_NUMBER.findall(after)
    number = int(numbers[-1]) + 1 if numbers else 0
    return error_event(endpoint, problem.detail or problem.title, problem.type, problem.status, number)


def refusal_event(endpoint: Endpoint, status: int, body: bytes) -> bytes:
    """Args: `body` is what vLLM's server has answered, with a status of its own."""
    try:
        fields = from_json(body)
        error: dict[str, Any] = fields["error"]
        return error_event(endpoint, str(error["message"]), str(error["type"]), status)
    except (ValueError, KeyError, TypeError):
        return error_event(endpoint, body.decode(errors="replace"), "error", status)


def error_event(endpoint: Endpoint, message: str, type_: str, status: int, number: int = 0) -> bytes:
    """Args: `number` of the event in a stream of the Responses API."""
    error = {"type": type_, "message": message, "code": status}
    if endpoint == "messages":
        return b"event: error\ndata: %s\n\n" % to_json({"type": "error", "error": error})
    if endpoint == "responses":
        fields = {"type": "error", "code": str(status), "message": message, "param": None, "sequence_number": number}
        return b"event: error\ndata: %s\n\n" % to_json({**fields, "error": error})
    return b"data: %s\n\ndata: [DONE]\n\n" % to_json({"error": error})
