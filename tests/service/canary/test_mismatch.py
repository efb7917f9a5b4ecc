"""Which replica is at fault, and which one nothing can be said of."""

import math
from itertools import cycle, islice, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.rollout_records.ratios import Sums
from service.canary.mismatch import (
    LEAST_APART,
    RECENT_COMPARISONS,
    Comparison,
    MismatchHistory,
    comparison_of,
)

APART, CLOSE = 3.0, 1.01


def comparison(one: str, other: str, mean_ratio: float) -> Comparison:
    return Comparison(one, other, Sums(tokens=2, ratio=2 * mean_ratio))


def history_of(faulty: set[str], replicas: str, rounds: int = LEAST_APART) -> MismatchHistory:
    """Each replica was compared with each other one, `rounds` times; a faulty one differs from every other."""
    history = MismatchHistory(1.5)
    for one, other in islice(cycle(permutations(replicas, 2)), rounds * len(replicas) * (len(replicas) - 1)):
        history.record(comparison(one, other, APART if {one, other} & faulty else CLOSE))
    return history


def test_a_comparison_has_the_mean_and_the_largest_ratio_of_the_probabilities() -> None:
    made = comparison_of("a", "b", [-1.0, math.log(0.5)], [-1.0, math.log(0.25)])
    assert (made.generated_by, made.scored_by) == ("a", "b")
    assert made.sums.mean_ratio == pytest.approx(1.5)
    assert made.sums.largest_ratio == pytest.approx(2.0)


@pytest.mark.parametrize("scored", [math.nan, math.inf, -math.inf, -1e6])
def test_a_score_that_is_no_number_or_far_off_counts_as_a_difference(scored: float) -> None:
    assert MismatchHistory(1.5).record(comparison_of("a", "b", [-1.0, -1.0], [-1.0, scored]))


def test_two_that_are_infinite_are_a_difference() -> None:
    assert MismatchHistory(1.5).record(comparison_of("a", "b", [-math.inf, -1.0], [-math.inf, -1.0]))


def test_one_token_of_many_that_is_far_off_is_no_difference() -> None:
    made = comparison_of("a", "b", [-1.0] * 100, [*[-1.0] * 99, -11.0])
    assert not MismatchHistory(1.5).record(made)
    assert made.sums.mean_ratio == pytest.approx(1.09)
    assert made.sums.share_beyond == 0.01


@pytest.mark.parametrize(("mean_ratio", "is_apart"), [(1.0, False), (1.5, False), (1.51, True), (math.nan, True)])
def test_two_replicas_differ_above_the_bound(mean_ratio: float, is_apart: bool) -> None:
    assert MismatchHistory(1.5).record(comparison("a", "b", mean_ratio)) == is_apart


@pytest.mark.parametrize("replicas", ["abc", "abcd", "abcdefgh"])
def test_the_one_replica_that_differs_from_all_others_is_at_fault(replicas: str) -> None:
    assert history_of({"b"}, replicas).at_fault() == "b"


def test_of_two_replicas_that_differ_none_is_at_fault() -> None:
    assert history_of({"a"}, "ab", rounds=20).at_fault() is None


def test_few_comparisons_say_nothing() -> None:
    history = MismatchHistory(1.5)
    for number in range(LEAST_APART - 1):
        history.record(comparison("b", "ac"[number % 2], APART))
        assert history.at_fault() is None
    history.record(comparison("b", "a", APART))
    assert history.at_fault() == "b"


def test_what_is_long_past_counts_no_more() -> None:
    history = history_of({"b"}, "abc")
    for number in range(RECENT_COMPARISONS):
        history.record(comparison("b", "ac"[number % 2], CLOSE))
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
    comparison, st.sampled_from("abcd"), st.sampled_from("abcd"), st.sampled_from([APART, CLOSE])
).filter(lambda made: made.generated_by != made.scored_by)


@given(st.lists(comparisons, max_size=60))
def test_a_replica_that_never_differed_is_never_at_fault(given_comparisons: list[Comparison]) -> None:
    history = MismatchHistory(1.5)
    differed = set[str]()
    for made in given_comparisons:
        if history.record(made):
            differed |= {made.generated_by, made.scored_by}
        assert history.at_fault() in {None, *differed}
