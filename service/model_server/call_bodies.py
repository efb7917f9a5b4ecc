"""Reads what the ingress must know of the body of a model server's call: the replica parses the rest.

That is whether it asks for a stream, how many answers it asks for, each of which the engine generates, which weights
may make those of token ids, and whether a text has half a surrogate pair, which is not a character and cannot be sent
on in UTF-8. Python's `json` accepts one, and so do vLLM's servers, where it breaks a call only in the engine.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from deployments.protocols.model_server import TOKEN_ENDPOINTS, Endpoint
from rollout_client.contract.base import PolicyDemand
from rollout_client.contract.problems import FieldProblem
from rollout_client.contract.sglang import VersionConstraint
from service.problems import dotted, invalid_request, shown

_STREAM_FIELD = "stream"
_STREAM_FIELD_IN_JSON = b'"stream"'
MOST_BYTES_INLINE = 2**16
_stream_as_vllm_reads_it: TypeAdapter[bool | None] = TypeAdapter(bool | None)


async def asks_for_stream(body: bytes) -> bool:
    """The `stream` of the body; false for a body that vLLM refuses, and for a name that is written in escapes."""
    if _STREAM_FIELD_IN_JSON not in body:
        return False
    if len(body) <= MOST_BYTES_INLINE:
        return _says_stream(body)
    return await asyncio.to_thread(_says_stream, body)


def _says_stream(body: bytes) -> bool:
    try:
        fields = from_json(body)
        return (
            bool(_stream_as_vllm_reads_it.validate_python(fields.get(_STREAM_FIELD)))
            if isinstance(fields, dict)
            else False
        )
    except (ValueError, ValidationError):
        return False


_ENCODING_BYTES = 4
"""JSON in UTF-16 or UTF-32 has a zero among so many."""
MAYBE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
ESCAPE_OR_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]|(?P<lone>\\u[dD][89a-fA-F]|\xed[\xa0-\xbf])|\\.", re.DOTALL
)
"""A whole pair of escapes, half a one, or any other escape: `\\\\ud800` is a backslash and a word."""
NAME = re.compile(rb'"(\w+)"\s*:')
_NAME_WITHIN_BYTES = 4096
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
    names = NAME.findall(body, max(0, place - _NAME_WITHIN_BYTES), place)
    return names[-1].decode() if names else "body"


def in_utf8(body: bytes) -> bytes:
    """As `json.loads` decodes it; what it cannot decode stays as it is, and the replica refuses it."""
    if 0 not in body[:_ENCODING_BYTES]:
        return body
    try:
        return body.decode(json.detect_encoding(body), "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return body


CHOICES_FIELD = "n"
CHOICES_FIELDS: Mapping[Endpoint, str] = {
    "chat/completions": CHOICES_FIELD,
    "completions": "prompt",
    "generate": "sampling_params.n",
    "inference/v1/generate": "sampling_params.n",
}
"""The endpoints whose calls may ask for several answers, with the field that says how many."""
_PROMPTS: Mapping[Endpoint, tuple[str, ...]] = {"completions": ("prompt",), "generate": ("text", "input_ids")}
"""The fields of an endpoint that may have several prompts, each with `n` choices."""
CHOICES_FIELD_IN_JSON = re.compile(rb'"(?:n|\\u006[eE])"')
_choices_as_vllm_reads_them: TypeAdapter[int | None] = TypeAdapter(int | None)


def fields_of(endpoint: Endpoint, body: bytes) -> dict[str, Any]:
    """The parsed body of a call that may ask for several answers; empty for others, and for one that vLLM refuses."""
    is_chat = endpoint == "chat/completions"
    if endpoint not in CHOICES_FIELDS or (
        # Most bodies of chats: they are parsed by the replica alone.
        is_chat and not (CHOICES_FIELD_IN_JSON.search(body) or 0 in body[:_ENCODING_BYTES])
    ):
        return {}
    try:
        # As vLLM parses it: another parser could read another number.
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def choices_of(endpoint: Endpoint, fields: Mapping[str, Any], most: int) -> int:
    """How many answers a body asks for: `n` for each prompt; 1 for a body that vLLM refuses.

    Args:
        most: rollouts of a request.

    Raises:
        RequestProblem: 422, it asks for more.
    """
    asked: Any = fields
    if endpoint in TOKEN_ENDPOINTS:
        asked = fields.get("sampling_params")
    try:
        given = asked.get(CHOICES_FIELD) if isinstance(asked, Mapping) else None
        choices = _choices_as_vllm_reads_them.validate_python(given)
    except ValidationError:
        return 1
    prompts = max((_prompts_in(fields.get(name)) for name in _PROMPTS.get(endpoint, ())), default=1)
    if (total := max(choices or 1, 1) * prompts) > most:
        message = f"{total} choices are more than limits.max_rollouts_per_request allows, which is {most}"
        problem = FieldProblem(field=CHOICES_FIELDS[endpoint], message=f"{message}; ask for fewer", value=total)
        raise invalid_request(problem)
    return total


def _prompts_in(prompt: Any) -> int:
    """How many prompts the field has: a list of texts or of lists of ids has several, a list of ids is one."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


_CONSTRAINT = "weight_version"
_ADAPTER = "lora_path"
_OF_SESSION = "the session says which weights answer its calls, in the `policy` that it was opened with; leave it out"


def demand_of(fields: dict[str, Any], demand: PolicyDemand) -> PolicyDemand:
    """Which weights may answer a call: as its body and its query (`demand`) say.

    Raises:
        RequestProblem: 422, its body says something that is not one, or other than the query.
    """
    asked: dict[str, Any] = {}
    if (given := fields.get(_CONSTRAINT)) is not None:
        try:
            constraint = VersionConstraint.model_validate(given)
        except ValidationError as error:
            problems = (
                FieldProblem(field=dotted((_CONSTRAINT, *one["loc"])), message=one["msg"], value=shown(one["input"]))
                for one in error.errors()
            )
            raise invalid_request(*problems) from error
        asked |= {"min_version": constraint.min_version, "version": constraint.exact_version}
    if (adapter := fields.get(_ADAPTER)) is not None:
        asked["name"] = adapter
    asked = {name: value for name, value in asked.items() if value is not None}
    for name, value in asked.items():
        if getattr(demand, name) not in (None, value):
            message = f"the query says {getattr(demand, name)!r}; say one of them"
            raise invalid_request(FieldProblem(field=_ADAPTER if name == "name" else _CONSTRAINT, message=message))
    try:
        return PolicyDemand.model_validate({**demand.model_dump(), **asked})
    except ValidationError:
        message = "it is not the name of a policy; give one that GET /policy lists under named"
        raise invalid_request(FieldProblem(field=_ADAPTER, message=message, value=shown(adapter))) from None


def refuse_demand(fields: dict[str, Any]) -> None:
    """Raises `RequestProblem` (422) if the body of a call of a session says which weights may answer it."""
    given = fields.get(_CONSTRAINT)
    if isinstance(given, dict) and not any(value is not None for value in given.values()):
        given = None
    asked = next((name for name, value in ((_CONSTRAINT, given), (_ADAPTER, fields.get(_ADAPTER))) if value), None)
    if asked is not None:
        raise invalid_request(FieldProblem(field=asked, message=_OF_SESSION, value=shown(fields[asked])))
