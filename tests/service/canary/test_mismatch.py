"""Which replica is at fault, and which one nothing can be said of."""

import math
from itertools import cycle, islice, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.canary.mismatch import (
    LEAST_APART,
    RECENT_COMPARISONS,
    Comparison,
    MismatchHistory,
    comparison_of,
)

APART, CLOSE = 3.0, 1.01


def history_of(faulty: set[str], replicas: str, rounds: int = LEAST_APART) -> MismatchHistory:
    """Each replica was compared with each other one, `rounds` times; a faulty one differs from every other."""
    history = MismatchHistory(1.5)
    for one, other in islice(cycle(permutations(replicas, 2)), rounds * len(replicas) * (len(replicas) - 1)):
        history.record(Comparison(one, other, APART if {one, other} & faulty else CLOSE, 9.0))
    return history


def test_a_comparison_has_the_mean_and_the_largest_ratio_of_the_probabilities() -> None:
    comparison = comparison_of("a", "b", [-1.0, math.log(0.5)], [-1.0, math.log(0.125)])
    assert (comparison.generated_by, comparison.scored_by) == ("a", "b")
    assert comparison.mean_ratio == pytest.approx(2.5)
    assert comparison.largest_ratio == pytest.approx(4.0)


@pytest.mark.parametrize("scored", [math.nan, math.inf, -math.inf, -1e6])
def test_a_score_that_is_not_finite_or_overflows_counts_as_a_difference(scored: float) -> None:
    comparison = comparison_of("a", "b", [-1.0, -1.0], [-1.0, scored])
    assert math.isnan(comparison.largest_ratio) or math.isinf(comparison.largest_ratio)
    assert MismatchHistory(1.5).record(comparison)


@pytest.mark.parametrize(("mean_ratio", "is_apart"), [(1.0, False), (1.5, False), (1.51, True), (math.nan, True)])
def test_two_replicas_differ_above_the_bound(mean_ratio: float, is_apart: bool) -> None:
    assert MismatchHistory(1.5).record(Comparison("a", "b", mean_ratio, 9.0)) == is_apart


@pytest.mark.parametrize("replicas", ["abc", "abcd", "abcdefgh"])
def test_the_one_replica_that_differs_from_all_others_is_at_fault(replicas: str) -> None:
    assert history_of({"b"}, replicas).at_fault() == "b"


def test_of_two_replicas_that_differ_none_is_at_fault() -> None:
    assert history_of({"a"}, "ab", rounds=20).at_fault() is None


def test_few_comparisons_say_nothing() -> None:
    history = MismatchHistory(1.5)
    for number in range(LEAST_APART - 1):
        history.record(Comparison("b", "ac"[number % 2], APART, 9.0))
        assert history.at_fault() is None
    history.record(Comparison("b", "a", APART, 9.0))
    assert history.at_fault() == "b"


def test_what_is_long_past_counts_no_more() -> None:
    history = history_of({"b"}, "abc")
    for number in range(RECENT_COMPARISONS):
        history.record(Comparison("b", "ac"[number % 2], CLOSE, 9.0))
    assert history.at_fault() is None


def test_once_a_faulty_replica_is_forgotten_the_others_are_sound() -> None:
    history = history_of({"b"}, "abc")
    history.forget("b")
    assert history.at_fault() is None
    assert set(history._recent) == {"a", "c"}


def test_comparisons_with_replicas_that_are_gone_are_forgotten() -> None:
    history = history_of({"b"}, "abcd")
    history.keep_only("acd")
    assert set(history._recent) == {"a", "c", "d"}
    assert {other for recent in history._recent.values() for other, _ in recent} == {"a", "c", "d"}


comparisons = st.builds(
    Comparison, st.sampled_from("abcd"), st.sampled_from("abcd"), st.sampled_from([APART, CLOSE]), st.just(9.0)
).filter(lambda comparison: comparison.generated_by != comparison.scored_by)


@given(st.lists(comparisons, max_size=60))
def test_a_replica_that_never_differed_is_never_at_fault(given_comparisons: list[Comparison]) -> None:
    history = MismatchHistory(1.5)
    differed = set[str]()
    for comparison in given_comparisons:
        if history.record(comparison):
            differed |= {comparison.generated_by, comparison.scored_by}
        assert history.at_fault() in {None, *differed}
