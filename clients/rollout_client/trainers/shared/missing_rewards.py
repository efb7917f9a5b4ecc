"""Rewards for trainers that need one of each rollout, also of those that failed."""

from collections import defaultdict
from collections.abc import Hashable, Sequence


def filled_in(rewards: Sequence[float | None], groups: Sequence[Hashable], otherwise: float) -> list[float]:
    """The rewards; a missing one is the mean of its group, or `otherwise` where the group has no reward.

    So the baseline of a group does not change.
    """
    known = defaultdict(list)
    for group, reward in zip(groups, rewards, strict=True):
        if reward is not None:
            known[group].append(reward)
    means = {group: sum(found) / len(found) for group, found in known.items()}
    return [
        means.get(group, otherwise) if reward is None else reward for group, reward in zip(groups, rewards, strict=True)
    ]
