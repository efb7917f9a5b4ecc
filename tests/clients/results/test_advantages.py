"""Advantages relative to a group: exact values, and laws that hold for all rewards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.results import group_relative_advantages, sample_std

REWARDS_AND_GROUPS = st.lists(st.tuples(st.none() | st.floats(-100, 100), st.integers(0, 2)), max_size=8)


def test_an_advantage_is_the_distance_from_the_mean_in_standard_deviations_of_the_group() -> None:
    advantages = group_relative_advantages([0, 5, 2, 7], ["a", "b", "a", "b"], epsilon=1.0)
    step = 1 / (2**0.5 + 1)
    assert advantages == pytest.approx([-step, -step, step, step])


def test_the_standard_deviation_has_n_minus_1_degrees_of_freedom_and_is_0_for_one_value() -> None:
    assert sample_std([1, 2, 3, 4], 2.5) == pytest.approx((5 / 3) ** 0.5)
    assert sample_std([7], 7) == 0


@given(REWARDS_AND_GROUPS, st.booleans())
def test_the_advantages_of_a_group_sum_to_zero(
    rewards_and_groups: list[tuple[float | None, int]], scale_rewards: bool
) -> None:
    rewards = [reward for reward, _ in rewards_and_groups]
    groups = [group for _, group in rewards_and_groups]
    advantages = group_relative_advantages(rewards, groups, scale_rewards=scale_rewards)
    for group in set(groups):
        members = [advantage for advantage, of in zip(advantages, groups, strict=True) if of == group]
        assert sum(members) == pytest.approx(0, abs=1e-8)


@given(REWARDS_AND_GROUPS, st.booleans())
def test_a_missing_reward_has_an_advantage_of_0_and_changes_no_other(
    rewards_and_groups: list[tuple[float | None, int]], scale_rewards: bool
) -> None:
    def advantages_of(kept: list[tuple[float | None, int]]) -> list[float]:
        return group_relative_advantages(
            [reward for reward, _ in kept], [group for _, group in kept], scale_rewards=scale_rewards
        )

    final = iter(advantages_of([pair for pair in rewards_and_groups if pair[0] is not None]))
    expected = [0.0 if reward is None else next(final) for reward, _ in rewards_and_groups]
    assert advantages_of(rewards_and_groups) == expected
