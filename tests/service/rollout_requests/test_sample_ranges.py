"""The samples that are drawn from ranges without end, and where the next ones begin."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from rollout_client.contract.selection import PlaceRange, SampleRange
from service.rollout_requests.sample_ranges import drawn_ranges, moved_past, pieces_of

Drawn = tuple[str, int]
"""A task and a place."""


def samples(ranges: list[SampleRange], count: int) -> list[Drawn]:
    return [
        (drawn.task_name, place)
        for drawn in drawn_ranges(ranges, count)
        for piece in pieces_of(drawn)
        for place in range(piece.start, piece.end)
    ]


@st.composite
def some_ranges(draw: st.DrawFn) -> list[SampleRange]:
    """At least one of them has a sample."""
    ranges = []
    for number in range(draw(st.integers(1, 3))):
        start, count = draw(st.integers(0, 9)), draw(st.integers(1, 6))
        left_out = draw(st.sets(st.integers(start, start + count - 1), max_size=count - (number == 0)))
        without = [PlaceRange(start=place, count=1) for place in sorted(left_out)]
        ranges.append(SampleRange(task_name=f"task {number}", start=start, count=count, without=without))
    return ranges


def test_ranges_are_drawn_one_after_the_other_and_then_those_that_follow() -> None:
    ranges = [SampleRange(task_name="a", start=4, count=3), SampleRange(task_name="b", count=1)]
    assert samples(ranges, 9) == [
        *(("a", 4), ("a", 5), ("a", 6), ("b", 0)),
        *(("a", 7), ("a", 8), ("a", 9), ("b", 1)),
        ("a", 10),
    ]
    assert moved_past(ranges, 6) == [
        SampleRange(task_name="a", start=9, count=3),
        SampleRange(task_name="b", start=1, count=1),
    ]


@given(ranges=some_ranges(), count=st.integers(0, 40))
def test_as_many_samples_are_drawn_as_asked_for_each_once(ranges: list[SampleRange], count: int) -> None:
    drawn = samples(ranges, count)
    assert len(drawn) == len(set(drawn)) == count


@given(ranges=some_ranges(), count=st.integers(0, 40))
def test_of_several_ranges_each_goes_on_where_it_was_left(ranges: list[SampleRange], count: int) -> None:
    whole = samples(ranges, 400)
    parts = samples(ranges, count) + samples(moved_past(ranges, count), 400)
    for drawn in ranges:
        of_range, of_parts = (
            list(islice((sample for sample in drawn_in if sample[0] == drawn.task_name), 20))
            for drawn_in in (whole, parts)
        )
        assert of_parts == of_range


def test_joined_ranges_may_have_more_places_than_one_that_is_sent() -> None:
    joined = SampleRange(task_name="t", count=1).model_copy(update={"count": 2**17})
    assert [(piece.start, piece.count) for piece in pieces_of(joined)] == [(0, 2**17)]
