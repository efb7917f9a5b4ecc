"""The share of the engines that a request gets by its `priority` and its caller's key."""

from collections.abc import Mapping
from dataclasses import replace
from uuid import uuid4

from deployments.protocols.generation import RequestShare, ScoringRequest
from rollout_client.contract.base import Priority
from service.access.keys import Caller

WEIGHTS = {"interactive": 16.0, "train": 1.0, "batch": 1 / 16}
"""Weights in proportion to a training request."""
CHECKS = "checks of replicas"
"""Stands for a key in the shares of checks: no key has a name with spaces."""
OTHER = "other"
"""The name for requests whose priority is a number."""


def weight_of(priority: Priority) -> float:
    return WEIGHTS[priority] if isinstance(priority, str) else float(priority)


def priority_name(weight: float) -> str:
    """The priority that has this weight; `other` if none has."""
    return next((name for name, of_name in WEIGHTS.items() if of_name == weight), OTHER)


def counts_by_priority(by_weight: Mapping[float, int]) -> dict[str, int]:
    """Counts by the name of the priority, with a 0 for a class without any; `other` are numbers."""
    counts = dict.fromkeys([*WEIGHTS, OTHER], 0)
    for weight, count in by_weight.items():
        counts[priority_name(weight)] += count
    return counts


def as_check(request: ScoringRequest) -> ScoringRequest:
    """The request as a check that the service makes of its own engines; all checks are one party, as `batch`."""
    name = f"{request.rollout_id}-{uuid4().hex[:16]}"
    share = RequestShare(name, WEIGHTS["batch"], CHECKS, WEIGHTS["batch"])
    return replace(request, rollout_id=name, group=name, share=share)


def share_of(unique_id: str, priority: Priority, caller: Caller) -> RequestShare:
    """The share of a request; `unique_id` is unique among all requests."""
    return RequestShare(unique_id, weight_of(priority), caller.name, caller.weight)
