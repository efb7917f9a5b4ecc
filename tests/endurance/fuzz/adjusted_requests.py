"""Changes of generated requests that let them get further into the service. No I/O."""

from collections.abc import Mapping
from typing import Any

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
