"""The share of the engines that a request gets by its `priority` and its caller's key."""

from collections.abc import Mapping

from deployments.protocols.generation import RequestShare
from rollout_client.contract.base import Priority
from service.access.keys import Caller

WEIGHTS = {"interactive": 16.0, "train": 1.0, "batch": 1 / 16}
"""Weights in proportion to a training request. None is infinite: a request of any priority makes progress."""
OTHER = "other"
"""The name for requests whose priority is a number."""


def weight_of(priority: Priority) -> float:
    return WEIGHTS[priority] if isinstance(priority, str) else float(priority)


def name_of_weight(weight: float) -> str:
    """The priority that has this weight; `other` for a number."""
    return next((name for name, known in WEIGHTS.items() if known == weight), OTHER)


def counts_by_priority(by_weight: Mapping[float, int]) -> dict[str, int]:
    """Counts by the name of the priority, with a 0 for a class without any; `other` are numbers."""
    counts = dict.fromkeys([*WEIGHTS, OTHER], 0)
    for weight, count in by_weight.items():
        counts[name_of_weight(weight)] += count
    return counts


def share_of(unique_id: str, priority: Priority, caller: Caller) -> RequestShare:
    """The share of a request; `unique_id` is unique among all requests."""
    return RequestShare(unique_id, weight_of(priority), caller.name, caller.weight)
