"""What counts as growth, and what as varying."""

from collections.abc import Sequence

import pytest

from benchmarks.growth import Bound, Growth, all_growth, growth_of, growth_problems, last_two_thirds


def growth(readings: Sequence[float], bound: Bound) -> Growth:
    return growth_of(*last_two_thirds(readings), bound)


def test_growth_is_the_difference_between_the_medians_of_the_last_two_thirds() -> None:
    readings = [0, 500, 0, 500, 10, 900, 10, 10, 12, 12, 0, 12]
    assert growth(readings, Bound(2)) == Growth(10, 12, 4, Bound(2))


def test_two_periods_of_one_length_may_have_different_numbers_of_readings() -> None:
    assert growth_of([1, 2, 3], [5, 5, 6, 7, 9], Bound(2)) == Growth(2, 6, 4, Bound(2))


@pytest.mark.parametrize(("last", "is_within"), [(10, True), (0, True), (13, True), (14, True), (14.5, False)])
def test_it_is_within_its_bound_up_to_the_floor_and_the_share_of_each_push(last: float, is_within: bool) -> None:
    assert Growth(10, last, 4, Bound(2, per_push=0.5)).is_within_bound is is_within


def test_a_leak_of_little_at_each_push_is_found() -> None:
    leaking = [1000.0 + 3 * push for push in range(99)]
    assert not growth(leaking, Bound(50, per_push=1)).is_within_bound
    assert growth(leaking, Bound(50, per_push=2)).is_within_bound


def test_what_fills_at_first_does_not_count() -> None:
    assert growth([0.0] * 10 + [100.0] * 20, Bound(0)).is_within_bound


def test_too_few_readings_say_nothing() -> None:
    with pytest.raises(ValueError, match="needs 12 readings, and there are 11"):
        last_two_thirds([1.0] * 11)


def test_each_quantity_is_bound_by_the_first_name_that_it_contains() -> None:
    bounds = {"memory of engine": Bound(1), "memory": Bound(2)}
    found = all_growth([{"memory of engine": 1.0}], [{"memory of store": 2.0}], bounds)
    assert found == {
        "memory of engine": Growth(1, 0, 1, Bound(1)),
        "memory of store": Growth(0, 2, 1, Bound(2)),
    }
    with pytest.raises(KeyError, match="threads"):
        all_growth([{"threads": 1.0}], [], bounds)


def test_a_sentence_names_each_quantity_that_grows() -> None:
    found = {"memory": Growth(1000, 2000, 5, Bound(999)), "threads": Growth(1, 2, 5, Bound(1))}
    assert growth_problems(found) == ["memory grew from 1,000 to 2,000 in 5 pushes"]
