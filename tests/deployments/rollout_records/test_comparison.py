"""The statistic of how far log-probabilities part: a few tokens decide nothing, and are told beside it."""

from math import e, exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.rollout_records.comparison import MOST_COUNTED, Sums

sizes = st.lists(st.floats(-30, 30), min_size=1, max_size=30)


def test_a_token_beyond_the_bound_counts_as_the_bound() -> None:
    sums = Sums.of([0.0, 1.0, -10.0, 0.0])
    assert sums.mean_ratio == pytest.approx((2 + e + MOST_COUNTED) / 4)
    assert sums.fields["share_beyond"] == 0.25
    assert sums.fields["largest_ratio"] == pytest.approx(exp(10))


def test_no_tokens_agree() -> None:
    assert Sums.of([]) == Sums()
    assert Sums().fields == {"tokens": 0, "mean_ratio": 1.0, "share_beyond": 0.0, "largest_ratio": 1.0}


@given(sizes, st.integers(0, 29), st.floats(-1e9, 1e9))
def test_a_token_moves_a_mean_by_at_most_9_over_the_number(differences: list[float], place: int, other: float) -> None:
    changed = list(differences)
    changed[place % len(changed)] = other
    moved = abs(Sums.of(changed).mean_ratio - Sums.of(differences).mean_ratio)
    assert moved <= (MOST_COUNTED - 1) / len(changed) + 1e-9
