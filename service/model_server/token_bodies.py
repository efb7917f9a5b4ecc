"""Reads what the ingress must know of the body of a call of token ids, SGLang's or vLLM's: the replica parses the rest.

That is how many answers it asks for, and which weights may make them.
"""

import json
from typing import Any

from pydantic import ValidationError

from deployments.protocols.model_server import Endpoint
from rollout_client.contract.base import PolicyDemand
from rollout_client.contract.problems import FieldProblem
from rollout_client.contract.sglang import VersionConstraint
from service.model_server.call_bodies import choices_as_vllm_reads_them, prompts_in
from service.problems import dotted, invalid_request, shown

CONSTRAINT = "weight_version"
ADAPTER = "lora_path"
PROMPTS = {"generate": ("text", "input_ids")}
"""The fields of an endpoint that may have several prompts."""
OF_SESSION = "the session says which weights answer its calls, in the `policy` that it was opened with; leave it out"


def fields_of(body: bytes) -> dict[str, Any]:
    """The parsed body; empty for one that the replica refuses."""
    try:
        # As Starlette parses it for vLLM: another parser could read another number.
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def choices_in(endpoint: Endpoint, fields: dict[str, Any]) -> int:
    """How many answers a body asks for: `n` for each prompt; 1 for a body that the replica refuses."""
    sampling = fields.get("sampling_params")
    first = sampling[0] if isinstance(sampling, list) and sampling else sampling
    given = first.get("n") if isinstance(first, dict) else None
    try:
        asked = choices_as_vllm_reads_them.validate_python(given)
    except ValidationError:
        return 1
    prompts = max((prompts_in(fields.get(name)) for name in PROMPTS.get(endpoint, ())), default=1)
    return max(asked or 1, 1) * prompts


def demand_of(fields: dict[str, Any], demand: PolicyDemand) -> PolicyDemand:
    """Which weights may answer a call: as its body and its query (`demand`) say.

    Raises:
        RequestProblem: 422, its body says something that is not one, or other than the query.
    """
    asked: dict[str, Any] = {}
    if (given := fields.get(CONSTRAINT)) is not None:
        try:
            constraint = VersionConstraint.model_validate(given)
        except ValidationError as error:
            raise invalid_request(
                *(
                    FieldProblem(field=dotted((CONSTRAINT, *one["loc"])), message=one["msg"], value=shown(one["input"]))
                    for one in error.errors()
                )
            ) from error
        asked |= {"min_version": constraint.min_version, "version": constraint.exact_version}
    if (adapter := fields.get(ADAPTER)) is not None:
        asked["name"] = adapter
    asked = {name: value for name, value in asked.items() if value is not None}
    for name, value in asked.items():
        if getattr(demand, name) not in (None, value):
            message = f"the query says {getattr(demand, name)!r}; say one of them"
            raise invalid_request(FieldProblem(field=ADAPTER if name == "name" else CONSTRAINT, message=message))
    try:
        return PolicyDemand.model_validate({**demand.model_dump(), **asked})
    except ValidationError:
        message = "it is not the name of a policy; give one that GET /policy lists under named"
        raise invalid_request(FieldProblem(field=ADAPTER, message=message, value=shown(adapter))) from None


def refuse_demand(fields: dict[str, Any]) -> None:
    """Raises `RequestProblem` (422) if the body of a call of a session says which weights may answer it."""
    given = fields.get(CONSTRAINT)
    if isinstance(given, dict) and not any(value is not None for value in given.values()):
        given = None
    asked = next((name for name, value in ((CONSTRAINT, given), (ADAPTER, fields.get(ADAPTER))) if value), None)
    if asked is not None:
        raise invalid_request(FieldProblem(field=asked, message=OF_SESSION, value=shown(fields[asked])))
