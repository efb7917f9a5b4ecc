"""Refuses JSON with half a surrogate pair, which is no character: no text that holds one can be sent on in UTF-8.

Python's `json` takes it, and so do vLLM's servers, where it breaks a call only in the engine.
"""

import json
import re

from rollout_client.problem_contract import FieldProblem
from service.responses.problems import invalid_request

ENCODING_BYTES = 4
"""JSON in UTF-16 or UTF-32 has a zero among so many."""
MAYBE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
ESCAPE_OR_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]|(?P<lone>\\u[dD][89a-fA-F]|\xed[\xa0-\xbf])|\\.", re.DOTALL
)
"""A whole pair of escapes, half a one, or any other escape: `\\\\ud800` is a backslash and a word."""


def refuse_lone_surrogates(body: bytes) -> None:
    """Raises `RequestProblem` (422) if a text of the JSON has one."""
    if has_lone_surrogate(in_utf8(body)):
        message = "a text has half a surrogate pair, such as \\ud800 alone, which is no character; leave it out"
        raise invalid_request(FieldProblem(field="", message=message, value=None))


def has_lone_surrogate(body: bytes) -> bool:
    """Args: `body` is JSON in UTF-8, where Python would write surrogates too."""
    if MAYBE.search(body) is None:
        return False
    return any(match["lone"] is not None for match in ESCAPE_OR_SURROGATE.finditer(body))


def in_utf8(body: bytes) -> bytes:
    """As `json.loads` decodes it; what it cannot decode stays as it is, and the replica refuses it."""
    if 0 not in body[:ENCODING_BYTES]:
        return body
    try:
        return body.decode(json.detect_encoding(body), "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return body
