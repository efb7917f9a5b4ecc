"""Reads what the ingress must know of the body of a model server's call: the replica parses the rest.

That is whether it asks for a stream, how many answers it asks for, each of which the engine generates, and whether a
text has half a surrogate pair, which is not a character and cannot be sent on in UTF-8. Python's `json` accepts one,
and so do vLLM's servers, where it breaks a call only in the engine.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from deployments.protocols.model_server import Endpoint
from rollout_client.contract.problems import FieldProblem
from service.problems import invalid_request

STREAM_FIELD = "stream"
STREAM_FIELD_IN_JSON = b'"stream"'
MOST_BYTES_INLINE = 2**16
stream_as_vllm_reads_it: TypeAdapter[bool | None] = TypeAdapter(bool | None)


async def asks_for_stream(body: bytes) -> bool:
    """The `stream` of the body; false for a body that vLLM refuses, and for a name that is written in escapes."""
    if STREAM_FIELD_IN_JSON not in body:
        return False
    if len(body) <= MOST_BYTES_INLINE:
        return says_stream(body)
    return await asyncio.to_thread(says_stream, body)


def says_stream(body: bytes) -> bool:
    try:
        fields = from_json(body)
        return (
            bool(stream_as_vllm_reads_it.validate_python(fields.get(STREAM_FIELD)))
            if isinstance(fields, dict)
            else False
        )
    except (ValueError, ValidationError):
        return False


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
        message = "a text has half a surrogate pair, such as \\ud800 alone, which is not a character; leave it out"
        raise invalid_request(FieldProblem(field=name_before(body, place), message=message, value=None))


def place_of_lone_surrogate(body: bytes) -> int | None:
    """The place of half a surrogate pair in JSON, which Python writes in UTF-8 too."""
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


CHOICES_FIELD = "n"
PROMPT_FIELD = "prompt"
CHOICES_FIELDS: Mapping[Endpoint, str] = {
    "chat/completions": CHOICES_FIELD,
    "completions": PROMPT_FIELD,
    "generate": "sampling_params.n",
    "inference/v1/generate": "sampling_params.n",
}
"""The endpoints whose calls may ask for several, with the field that says how many. A text completion may have several
prompts, each with `n` choices, and so may a call of `/generate`.
"""
CHOICES_FIELD_IN_JSON = re.compile(rb'"(?:n|\\u006[eE])"')
choices_as_vllm_reads_them: TypeAdapter[int | None] = TypeAdapter(int | None)


def choices_of(endpoint: Endpoint, body: bytes, most: int) -> int:
    """The `n` of the body, for each prompt of a text completion; 1 for a body that vLLM refuses.

    Args:
        most: rollouts of a request.

    Raises:
        RequestProblem: 422, it asks for more.
    """
    if endpoint not in CHOICES_FIELDS:
        return 1
    if endpoint == "chat/completions" and not (CHOICES_FIELD_IN_JSON.search(body) or 0 in body[:ENCODING_BYTES]):
        # Most bodies: they are parsed by the replica alone.
        return 1
    try:
        # As Starlette parses it for vLLM: another parser could read another number.
        fields = json.loads(body)
        asked = choices_as_vllm_reads_them.validate_python(
            fields.get(CHOICES_FIELD) if isinstance(fields, dict) else None
        )
    except (ValueError, RecursionError, ValidationError):
        return 1
    prompts = prompts_in(fields.get(PROMPT_FIELD)) if endpoint == "completions" and isinstance(fields, dict) else 1
    return not_too_many(endpoint, max(asked or 1, 1) * prompts, most)


def not_too_many(endpoint: Endpoint, choices: int, most: int) -> int:
    """The number of choices. Raises `RequestProblem` (422) if it is above `most`."""
    if choices > most:
        field = CHOICES_FIELDS[endpoint]
        message = f"{choices} choices are more than limits.max_rollouts_per_request allows, which is {most}"
        raise invalid_request(FieldProblem(field=field, message=f"{message}; ask for fewer", value=choices))
    return choices


def prompts_in(prompt: Any) -> int:
    """How many prompts the field has: a list of texts or of lists of ids has several, a list of ids is one."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
