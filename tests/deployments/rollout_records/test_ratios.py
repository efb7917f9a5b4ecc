"""The statistic of how far log-probabilities part: a few tokens decide nothing, and are told beside it."""

from math import e, exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.rollout_records.ratios import MOST_COUNTED, Sums, TokenLabels, sums_by

sizes = st.lists(st.floats(-30, 30), min_size=1, max_size=30)


def test_a_token_beyond_the_bound_counts_as_the_bound_and_is_told_beside_the_mean() -> None:
    sums = Sums.of([0.0, 1.0, -10.0, 0.0])
    assert sums.mean_ratio == pytest.approx((2 + e + MOST_COUNTED) / 4)
    assert sums.share_beyond == 0.25
    assert sums.largest_ratio == pytest.approx(exp(10))


def test_no_tokens_agree() -> None:
    assert Sums.of([]) == Sums()
    assert (Sums().mean_ratio, Sums().share_beyond, Sums().largest_ratio, Sums().mean_size) == (1.0, 0.0, 1.0, 0.0)


@given(sizes, st.integers(0, 29), st.floats(-1e9, 1e9))
def test_one_token_moves_the_mean_by_nine_over_their_number_at_most(
    differences: list[float], place: int, other: float
) -> None:
    changed = list(differences)
    changed[place % len(changed)] = other
    moved = abs(Sums.of(changed).mean_ratio - Sums.of(differences).mean_ratio)
    assert moved <= (MOST_COUNTED - 1) / len(changed) + 1e-9


@given(st.lists(st.tuples(st.sampled_from("abc"), sizes), min_size=1, max_size=8))
def test_the_sums_of_spans_are_those_of_their_tokens(spans: list[tuple[str, list[float]]]) -> None:
    together = np.concatenate([differences for _, differences in spans])
    names = list(dict.fromkeys(label for label, _ in spans))
    codes = np.repeat([names.index(label) for label, _ in spans], [len(differences) for _, differences in spans])
    found = sums_by(TokenLabels(names, codes), together)
    assert list(found) == names
    for label, sums in found.items():
        of_label = Sums.of(np.concatenate([differences for name, differences in spans if name == label]))
        assert (sums.tokens, sums.beyond, sums.largest) == (of_label.tokens, of_label.beyond, of_label.largest)
        assert (sums.size, sums.ratio) == pytest.approx((of_label.size, of_label.ratio))
