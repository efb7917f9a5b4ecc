"""Credit by turn: the rewards of the turns of rollouts, and the advantages that they become. Needs numpy."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollout_client.results import group_relative_advantages
from rollout_client.tensors.rollouts import TokenColumns, boundaries
from rollout_client.turn_rewards import rewards_by_turn

CreditFunction = Callable[[Sequence[Sequence[float]]], Sequence[Sequence[float]]]
"""The advantages of the turns of one group, by rollout and turn, from the rewards of these turns."""
Credit = Literal["total", "turn"] | CreditFunction


def turn_advantages(
    rewards: Sequence[Sequence[float]], *, discount: float = 1.0, scale_rewards: bool = True
) -> list[list[float]]:
    """`(return - mean) / (std + STD_EPSILON)` of each turn, over the returns of all turns of all rollouts of one group.

    The return of a turn is its reward and the discounted rewards of the turns after it: each turn is a sample of its
    own in the group of GRPO, as Kevin trains (arXiv:2507.11948, section 4). Where rollouts have one turn each, the
    results are those of `group_relative_advantages`. A baseline for each turn's index would leave the last turns of the
    longest rollout without others to be compared with.

    Args:
        rewards: by rollout and turn.
        discount: factor of a reward for each turn that it lies ahead.
        scale_rewards: as in `group_relative_advantages`.

    Raises:
        ValueError: `discount` is not between 0 and 1.
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"discount must be between 0 and 1, and it is {discount}.")
    returns = [_discounted_returns(of_rollout, discount) for of_rollout in rewards]
    pooled = list(chain.from_iterable(returns))
    advantages = iter(group_relative_advantages(pooled, [0] * len(pooled), scale_rewards=scale_rewards))
    return [[next(advantages) for _ in of_rollout] for of_rollout in returns]


def _discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    return [*accumulate(reversed(rewards), lambda ahead, reward: reward + discount * ahead)][::-1]


def turns_of(columns: TokenColumns, totals: Sequence[float | None], are_whole: Sequence[bool]) -> list[list[float]]:
    """The rewards of the turns of each rollout; see `rewards_by_turn`."""
    generated = (columns.logprob_counts >= 0).tolist()
    trained = columns.trained.tolist()
    rewards = [None if math.isnan(reward) else reward for reward in columns.rewards.tolist()]
    parts = pairwise(boundaries(columns.message_counts).tolist())
    return [
        rewards_by_turn(generated[begin:end], trained[begin:end], rewards[begin:end], total, is_whole=is_whole)
        for (begin, end), total, is_whole in zip(parts, totals, are_whole, strict=True)
    ]


def credited_tokens(
    columns: TokenColumns,
    turns: Sequence[Sequence[float]],
    groups: Sequence[int],
    is_final: Sequence[bool],
    credit: CreditFunction,
) -> NDArray[np.float32]:
    """[N]: the advantage of each token's turn; 0 for tokens that may not be trained, and in rollouts without a final
    reward, which `credit` does not get.

    Raises:
        ValueError: `credit` does not return one advantage for each turn.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for place, (group, final) in enumerate(zip(groups, is_final, strict=True)):
        if final:
            members[group].append(place)
    advantages: list[Sequence[float]] = [[0.0] * len(rewards) for rewards in turns]
    for places in members.values():
        credited = credit([turns[place] for place in places])
        if [len(each) for each in credited] != [len(turns[place]) for place in places]:
            raise ValueError("The credit function must return one advantage for each turn of each rollout.")
        for place, each in zip(places, credited, strict=True):
            advantages[place] = each
    by_message = np.zeros(len(columns.token_counts), np.float32)
    by_message[columns.trained] = list(chain.from_iterable(advantages))
    return np.repeat(by_message, columns.token_counts)
