"""A shuffle is a bijection, and depends on its key alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.data.task_data import Permutation


def permuted(size: int, *key: int | str) -> list[int]:
    places: list[int] = Permutation(size, key)(np.arange(size, dtype=np.uint64)).tolist()
    return places


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 100))
def test_every_place_goes_to_one_place(size: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(size, seed, epoch)) == list(range(size))


def test_the_shuffle_of_a_key_never_changes() -> None:
    assert permuted(10, 0, 0) == [8, 7, 2, 3, 1, 9, 5, 4, 0, 6]
    assert permuted(10, 0, 1) == [0, 4, 8, 7, 9, 2, 1, 6, 3, 5]


@pytest.mark.parametrize("size", [100, 1000])
def test_shuffles_of_different_keys_agree_in_about_one_place(size: int) -> None:
    others = [permuted(size, seed, epoch) for seed in range(4) for epoch in range(4)]
    agreements = [
        sum(left == right for left, right in zip(one, other, strict=True))
        for place, one in enumerate(others)
        for other in [*others[:place], list(range(size))]
    ]
    assert 0.8 < sum(agreements) / len(agreements) < 1.2


def test_neighbours_do_not_stay_together() -> None:
    """Steps between the rows of neighbouring places are as long as those of a random order: a third of the size."""
    steps = np.abs(np.diff(permuted(100_000, 7)))
    assert 0.32 < steps.mean() / 100_000 < 0.35
