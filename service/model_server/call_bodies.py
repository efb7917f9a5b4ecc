"""Reads what the ingress must know of the body of a model server's call: the replica reads the rest.

That is whether it asks for a stream, how many answers it asks for, each of which the engine generates, which weights
may make those of token ids, the images that it shows (`call_images.py`), and whether a text has half a surrogate pair,
which is not a character and cannot be sent on in UTF-8. Python's `json` accepts one, and so do vLLM's servers, where it
breaks a call only in the engine.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from deployments.protocols.model_server import TOKEN_ENDPOINTS, Endpoint
from rollout_client.contract.base import PolicyDemand
from rollout_client.contract.problems import FieldProblem
from rollout_client.contract.sglang import VersionConstraint
from service.problems import dotted, invalid_request, shown

MOST_BYTES_INLINE = 2**16
NAME = re.compile(r'"(\w+)"\s*:')
_NAME_WITHIN = 4096
"""Characters. A text of megabytes is not looked through."""


async def fields_of(body: bytes) -> dict[str, Any]:
    """The parsed body; empty for one that vLLM refuses.

    Raises:
        RequestProblem: 422, it is nested too deeply, or a text has half a surrogate pair.
    """
    return parsed(body) if len(body) <= MOST_BYTES_INLINE else await asyncio.to_thread(parsed, body)


def parsed(body: bytes) -> dict[str, Any]:
    """As `fields_of`."""
    try:
        # As vLLM parses it: another parser could read another number, or other images.
        fields = json.loads(body)
        try:
            # Ten times as fast as Python's encoder, and refuses more: integers of any size too.
            orjson.dumps(fields)
        except orjson.JSONEncodeError:
            _refuse_half_pairs(fields)
    except RecursionError:
        raise invalid_request(FieldProblem(field="body", message="it is nested too deeply")) from None
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _refuse_half_pairs(fields: Any) -> None:
    """Raises `RequestProblem` (422) if a text has half a surrogate pair; it names the field."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        message = "a text has half a surrogate pair, such as \\ud800 alone, which is not a character; leave it out"
        names = NAME.findall(error.object, max(0, error.start - _NAME_WITHIN), error.start)
        problem = FieldProblem(field=names[-1] if names else "body", message=message, value=None)
        raise invalid_request(problem) from None


_stream_as_vllm_reads_it: TypeAdapter[bool | None] = TypeAdapter(bool | None)


def asks_for_stream(fields: Mapping[str, Any]) -> bool:
    """The `stream` of a body; false for one that vLLM refuses."""
    try:
        return bool(_stream_as_vllm_reads_it.validate_python(fields.get("stream")))
    except ValidationError:
        return False


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
_choices_as_vllm_reads_them: TypeAdapter[int | None] = TypeAdapter(int | None)


def choices_of(endpoint: Endpoint, fields: Mapping[str, Any], most: int) -> int:
    """How many answers a body asks for: `n` for each prompt; 1 for a body that vLLM refuses.

    Args:
        most: rollouts of a request.

    Raises:
        RequestProblem: 422, it asks for more.
    """
    if endpoint not in CHOICES_FIELDS:
        return 1
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


def demand_of(fields: Mapping[str, Any], demand: PolicyDemand) -> PolicyDemand:
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


def refuse_demand(fields: Mapping[str, Any]) -> None:
    """Raises `RequestProblem` (422) if the body of a call of a session says which weights may answer it."""
    given = fields.get(_CONSTRAINT)
    if isinstance(given, dict) and not any(value is not None for value in given.values()):
        given = None
    asked = next((name for name, value in ((_CONSTRAINT, given), (_ADAPTER, fields.get(_ADAPTER))) if value), None)
    if asked is not None:
        raise invalid_request(FieldProblem(field=asked, message=_OF_SESSION, value=shown(fields[asked])))
