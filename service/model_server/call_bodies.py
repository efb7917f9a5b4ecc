"""Refuses JSON with half a surrogate pair, which is no character: no text that holds one can be sent on in UTF-8.

Python's `json` takes it, and so do vLLM's servers, where it breaks a call only in the engine.
"""

import json
import re

from rollout_client.problem_contract import FieldProblem
from service.problems import invalid_request

ENCODING_BYTES = 4
"""JSON in UTF-16 or UTF-32 has a zero among so many."""
MAYBE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
ESCAPE_OR_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]|(?P<lone>\\u[dD][89a-fA-F]|\xed[\xa0-\xbf])|\\.", re.DOTALL
)
"""A whole pair of escapes, half a one, or any other escape: `\\\\ud800` is a backslash and a word."""
NAME = re.compile(rb'"(\w+)"\s*:')
NAME_WITHIN_BYTES = 4096
"""A text of megabytes is not looked through."""


def refuse_lone_surrogates(body: bytes) -> None:
    """Raises `RequestProblem` (422) if a text of the JSON has one; it names the field."""
    body = in_utf8(body)
    if (place := place_of_lone_surrogate(body)) is not None:
        message = "a text has half a surrogate pair, such as \\ud800 alone, which is no character; leave it out"
        raise invalid_request(FieldProblem(field=name_before(body, place), message=message, value=None))


def place_of_lone_surrogate(body: bytes) -> int | None:
    """Args: `body` is JSON in UTF-8, where Python would write surrogates too."""
    if MAYBE.search(body) is None:
        return None
    halves = (match.start() for match in ESCAPE_OR_SURROGATE.finditer(body) if match["lone"] is not None)
    return next(halves, None)


def name_before(body: bytes, place: int) -> str:
    """The last name of a field before this place, or `body` where there is none near it."""
    names = NAME.findall(body, max(0, place - NAME_WITHIN_BYTES), place)
    return names[-1].decode() if names else "body"


def in_utf8(body: bytes) -> bytes:
    """As `json.loads` decodes it; what it cannot decode stays as it is, and the replica refuses it."""
    if 0 not in body[:ENCODING_BYTES]:
        return body
    try:
        return body.decode(json.detect_encoding(body), "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return body
