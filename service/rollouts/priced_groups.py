"""Prices the rollouts of a group: decides how many more are started, given those that have ended. No I/O.

Guarantees: a group has `min` to `max` rollouts; their number depends on their results alone, taken in waves of `min`,
and not on the order or the time in which they end; a failed rollout, or one that was cut off, is no evidence.
"""

from collections.abc import Sequence

from rollout_client.contract.group_conditions import GenerationRange
from rollout_client.contract.rollouts import SampleResult
from rollout_client.results import final_reward, wilson_interval


def next_wave(generations: GenerationRange, results: Sequence[SampleResult]) -> int:
    """How many rollouts of a group are started next; 0 if it is complete.

    Args:
        results: those of all its rollouts that were started, in any order.
    """
    rewards = [reward for reward in map(final_reward, results) if reward is not None]
    # What fails each time would fail `max` times.
    if not rewards or is_decided(generations, rewards):
        return 0
    return min(generations.min, generations.max - len(results))


def is_decided(generations: GenerationRange, rewards: Sequence[float]) -> bool:
    """Whether it is known that the group does not teach, or that it does, as precisely as was asked for.

    Args:
        rewards: total rewards of the rollouts that were played to their ends, at least one.
    """
    passed = sum(reward >= generations.passes_at for reward in rewards)
    low, high = wilson_interval(passed / len(rewards), len(rewards), generations.confidence)
    lowest, highest = generations.teaches
    if high < lowest or low > highest:
        return True
    return 0 < passed < len(rewards) and high - low <= generations.width
