"""The share of the engines that a request gets by its `priority` and its caller's key."""

from deployments.protocols import RequestShare
from rollout_client.priority_contract import Priority
from service.access.keys import Caller

WEIGHTS = {"interactive": 16.0, "train": 1.0, "batch": 1 / 16}
"""In proportion to a training request. None is infinite: a request of any priority always gets on."""


def weight_of(priority: Priority) -> float:
    return WEIGHTS[priority] if isinstance(priority, str) else float(priority)


def share_of(unique_id: str, priority: Priority, caller: Caller) -> RequestShare:
    """Args: `unique_id` is the request's, unique among all requests."""
    return RequestShare(unique_id, weight_of(priority), caller.name, caller.weight)
