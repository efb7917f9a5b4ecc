"""How many answers a call of a model server's API asks for: the engine generates each one."""

import json
import re

from pydantic import TypeAdapter, ValidationError

from deployments.serving_records import Endpoint
from rollout_client.problem_contract import FieldProblem
from service.model_server.call_bodies import ENCODING_BYTES
from service.problems import invalid_request

FIELD = "n"
WITH_CHOICES: tuple[Endpoint, ...] = ("chat/completions",)
"""The endpoints whose calls may ask for several."""
FIELD_IN_JSON = re.compile(rb'"(?:n|\\u006[eE])"')
as_vllm_reads_it: TypeAdapter[int | None] = TypeAdapter(int | None)


def choices_of(endpoint: Endpoint, body: bytes, most: int) -> int:
    """What `n` of the body says; 1 for a body that vLLM refuses.

    Args:
        most: rollouts of a request.

    Raises:
        RequestProblem: 422, it asks for more.
    """
    if endpoint not in WITH_CHOICES or not (FIELD_IN_JSON.search(body) or 0 in body[:ENCODING_BYTES]):
        # Most bodies: they are parsed by the replica alone.
        return 1
    try:
        # As Starlette parses it for vLLM: another parser could read another number.
        fields = json.loads(body)
        asked = as_vllm_reads_it.validate_python(fields.get(FIELD) if isinstance(fields, dict) else None)
    except (ValueError, RecursionError, ValidationError):
        return 1
    choices = max(asked or 1, 1)
    if choices > most:
        message = f"{choices} choices are more than limits.max_rollouts_per_request allows, which is {most}"
        raise invalid_request(FieldProblem(field=FIELD, message=f"{message}; ask for fewer", value=choices))
    return choices
