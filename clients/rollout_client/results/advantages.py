"""Advantages: each reward relative to the other rewards of its group, as GRPO defines them."""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

STD_EPSILON = 1e-4
"""TRL's GRPOTrainer adds the same value to the standard deviation."""


def group_relative_advantages(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    scale_rewards: bool = True,
    epsilon: float = STD_EPSILON,
) -> list[float]:
    """`(reward - mean) / (std + epsilon)` over the rewards of one group, as in GRPO (arXiv:2402.03300).

    Args:
        rewards: one per rollout; `None` where a rollout has no final reward. Such a rollout enters no statistic of its
            group, and its advantage is 0.
        groups: the group of each rollout, of the same length as `rewards`. The advantage in a group of one is 0.
        scale_rewards: divide by the standard deviation with n - 1 degrees of freedom, as TRL's GRPOTrainer does.
            Without it the result is `reward - mean`, as in Dr. GRPO (arXiv:2503.20783).
        epsilon: added to the standard deviation, so that equal rewards give 0 and not a division by zero.
    """
    rewards_by_group: dict[Hashable, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            rewards_by_group[group].append(reward)
    means = {group: math.fsum(found) / len(found) for group, found in rewards_by_group.items()}
    scales = {
        group: sample_std(found, means[group]) + epsilon if scale_rewards else 1.0
        for group, found in rewards_by_group.items()
    }
    return [
        0.0 if reward is None else (reward - means[group]) / scales[group]
        for reward, group in zip(rewards, groups, strict=True)
    ]


def sample_std(values: Sequence[float], mean: float) -> float:
    """Standard deviation of `values` with n - 1 degrees of freedom; 0 for a single value."""
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))
