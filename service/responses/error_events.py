"""The error with which a stream of a model server's API ends, in the form that the official clients of the API read.

vLLM's servers end a stream so that has failed midway. Here they are for a stream whose status was sent before its
answer had begun.
"""

from typing import Any

from pydantic_core import from_json, to_json

from deployments.serving_records import Endpoint
from rollout_client.problem_contract import Problem


def problem_event(endpoint: Endpoint, problem: Problem) -> bytes:
    return error_event(endpoint, problem.detail or problem.title, problem.type, problem.status)


def refusal_event(endpoint: Endpoint, status: int, body: bytes) -> bytes:
    """Args: `body` is what vLLM's server has answered, with a status of its own."""
    try:
        fields = from_json(body)
        error: dict[str, Any] = fields["error"]
        return error_event(endpoint, str(error["message"]), str(error["type"]), status)
    except (ValueError, KeyError, TypeError):
        return error_event(endpoint, body.decode(errors="replace"), "error", status)


def error_event(endpoint: Endpoint, message: str, type_: str, status: int) -> bytes:
    error = {"type": type_, "message": message, "code": status}
    if endpoint == "messages":
        return b"event: error\ndata: %s\n\n" % to_json({"type": "error", "error": error})
    if endpoint == "responses":
        fields = {"type": "error", "code": str(status), "message": message, "param": None, "sequence_number": 0}
        return b"event: error\ndata: %s\n\n" % to_json({**fields, "error": error})
    return b"data: %s\n\ndata: [DONE]\n\n" % to_json({"error": error})
