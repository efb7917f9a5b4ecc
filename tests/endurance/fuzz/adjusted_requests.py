"""Changes of generated requests that let them get further into the service. No I/O."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from pydantic import ValidationError

from rollout_client.contract.base import PolicyDemand

VOCABULARY = 262
"""Of the embedded model."""
LONGEST_WAIT_S = 0.05
"""Of valid values of the parameters that wait for something: what they do is tested elsewhere."""
WAITS = ("wait_s", "checksums_within_s")


def with_short_waits(query: Mapping[str, Any]) -> dict[str, Any]:
    """The query with shorter waits, also of those that are numbers only as texts."""
    return {
        name: LONGEST_WAIT_S if name in WAITS and is_longer(value, LONGEST_WAIT_S) else value
        for name, value in query.items()
    }


def is_longer(value: Any, seconds: float) -> bool:
    if isinstance(value, bool):
        return False
    try:
        return float(value) > seconds
    except (TypeError, ValueError, OverflowError):
        return False


def with_known_tokens(body: Any) -> Any:
    """A body of `POST /score` whose numbers are ids that the model has, under the current weights.

    What is not as the contract says is left as it is, and so is every other body: ids that no model has are refused
    early.
    """
    sequences = body.get("sequences") if isinstance(body, dict) else None
    if not isinstance(sequences, list) or len(sequences) % 2 == 0:
        return body
    known = [
        [token % VOCABULARY if is_whole(token) else token for token in sequence]
        if isinstance(sequence, list)
        else sequence
        for sequence in sequences
    ]
    further = {name: value for name, value in body.items() if name != "sequences"}
    if "policy" in further and is_demand(further["policy"]):
        del further["policy"]
    start = further.get("start")
    if is_whole(start):
        shortest = min((len(sequence) for sequence in known if isinstance(sequence, list)), default=0)
        further["start"] = start % shortest if shortest else start
    return {"sequences": known, **further}


def is_demand(value: Any) -> bool:
    """Whether it is well formed: what is not must be refused, and stays."""
    try:
        PolicyDemand.model_validate(value, strict=True)
    except ValidationError:
        return False
    return True


def is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
