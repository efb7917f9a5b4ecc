"""Reads what the ingress must know of the body of a model server's call: the replica reads the rest.

That is whether it asks for a stream, how many answers it asks for, each of which the engine generates, which weights
may make those of token ids, the images that it shows (`call_images.py`), and whether a text has half a surrogate pair,
which is not a character and cannot be sent on in UTF-8. Python's `json` accepts one, and so do vLLM's servers, where it
breaks a call only in the engine.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from deployments.protocols.model_server import TOKEN_ENDPOINTS, Endpoint
from rollout_client.contract.base import FieldProblem, PolicyDemand, PolicyName
from service.model_server.sglang import VersionConstraint
from service.problems import invalid_request, shown, validation_problem

MOST_BYTES_INLINE = 2**16


async def fields_of(body: bytes) -> dict[str, Any]:
    """The parsed body; empty for one that vLLM refuses.

    Raises:
        RequestProblem: 422, it is nested too deeply, or a text has half a surrogate pair.
    """
    return _parsed(body) if len(body) <= MOST_BYTES_INLINE else await asyncio.to_thread(_parsed, body)


def _parsed(body: bytes) -> dict[str, Any]:
    """As `fields_of`."""
    try:
        # As vLLM parses it: another parser could read another number, or other images.
        fields = json.loads(body)
        try:
            # Ten times as fast as Python's encoder, and refuses more: integers of any size too.
            orjson.dumps(fields)
        except orjson.JSONEncodeError:
            json.dumps(fields, ensure_ascii=False).encode()
    except RecursionError:
        raise invalid_request(FieldProblem(field="body", message="it is nested too deeply")) from None
    except UnicodeEncodeError:
        message = "a text has half a surrogate pair, such as \\ud800 alone, which is not a character; leave it out"
        raise invalid_request(FieldProblem(field="body", message=message)) from None
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


_STREAM: TypeAdapter[bool | None] = TypeAdapter(bool | None)
_CHOICES: TypeAdapter[int | None] = TypeAdapter(int | None)


def _as_vllm_reads(kind: TypeAdapter[Any], value: Any) -> Any:
    """The value of a field; `None` for one that vLLM refuses."""
    try:
        return kind.validate_python(value)
    except ValidationError:
        return None


def asks_for_stream(fields: Mapping[str, Any]) -> bool:
    """The `stream` of a body; false for one that vLLM refuses."""
    return bool(_as_vllm_reads(_STREAM, fields.get("stream")))


CHOICES_FIELD = "n"
_PROMPTS: Mapping[Endpoint, tuple[str, ...]] = {
    "chat/completions": (),
    "completions": ("prompt",),
    "generate": ("text", "input_ids"),
    "inference/v1/generate": (),
}
"""The endpoints whose calls may ask for several answers, with the fields that may have several prompts, each with `n`
choices."""


def choices_of(endpoint: Endpoint, fields: Mapping[str, Any], most: int) -> int:
    """How many answers a body asks for: `n` for each prompt; 1 for a body that vLLM refuses.

    Args:
        most: rollouts of a request.

    Raises:
        RequestProblem: 422, it asks for more.
    """
    if endpoint not in _PROMPTS:
        return 1
    asked: Any = fields.get("sampling_params") if endpoint in TOKEN_ENDPOINTS else fields
    choices = _as_vllm_reads(_CHOICES, asked.get(CHOICES_FIELD) if isinstance(asked, Mapping) else None)
    prompts = max((_prompts_in(fields.get(name)) for name in _PROMPTS[endpoint]), default=1)
    if (total := max(choices or 1, 1) * prompts) > most:
        message = f"{total} choices are more than limits.max_rollouts_per_request allows, which is {most}"
        raise invalid_request(FieldProblem(field=CHOICES_FIELD, message=f"{message}; ask for fewer", value=total))
    return total


def _prompts_in(prompt: Any) -> int:
    """How many prompts the field has: a list of texts or of lists of ids has several, a list of ids is one."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


_OF_SESSION = "the session says which weights answer its calls, in the `policy` that it was opened with; leave it out"
_OF_QUERY = "the query says another one; say one of them"


class _DemandingBody(BaseModel):
    """The fields of a call of token ids that say which weights may answer it."""

    weight_version: VersionConstraint | None = None
    lora_path: PolicyName | None = None


def demand_of(fields: Mapping[str, Any], demand: PolicyDemand, is_of_session: bool) -> PolicyDemand:
    """Which weights may answer a call: as its body and its query (`demand`) say.

    Raises:
        RequestProblem: 422, its body says something that is not one, other than the query, or anything in a session.
    """
    try:
        body = _DemandingBody.model_validate(fields)
    except ValidationError as error:
        raise validation_problem(error) from error
    constraint = body.weight_version or VersionConstraint()
    given = {"name": body.lora_path, "min_version": constraint.min_version, "version": constraint.exact_version}
    asked = {name: value for name, value in given.items() if value is not None}
    for name, value in asked.items():
        if is_of_session or getattr(demand, name) not in (None, value):
            field = "lora_path" if name == "name" else "weight_version"
            message = _OF_SESSION if is_of_session else _OF_QUERY
            raise invalid_request(FieldProblem(field=field, message=message, value=shown(fields[field])))
    return demand.model_copy(update=asked)
