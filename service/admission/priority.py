"""The share of the engines that a request's `priority` stands for."""

from rollout_client.priority_contract import Priority

WEIGHTS = {"interactive": 16.0, "train": 1.0, "batch": 1 / 16}
"""In proportion to a training request. None is infinite: a request of any priority always gets on."""


def weight_of(priority: Priority) -> float:
    return WEIGHTS[priority] if isinstance(priority, str) else float(priority)
