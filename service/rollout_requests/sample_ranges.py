"""Arithmetic of sample ranges: which parts of them a number of drawn samples takes, and what is left of them."""

from collections.abc import Iterable, Iterator, Sequence

from rollout_client.contract.selection import PlaceRange, SampleRange


def pieces_of(drawn: SampleRange) -> Iterator[PlaceRange]:
    """The places that are not left out, in ascending order."""
    # Without validation: ranges that the service has joined may have more places than one that is sent.
    at = drawn.start
    for end, after in [*((each.start, each.end) for each in drawn.without), (drawn.end, drawn.end)]:
        if at < end:
            yield PlaceRange.model_construct(start=at, count=end - at)
        at = after


def following(drawn: SampleRange) -> SampleRange:
    """As many samples, from where these end."""
    return drawn.model_copy(update={"start": drawn.end, "without": []})


def drawn_ranges(ranges: Iterable[SampleRange], count: int) -> Iterator[SampleRange]:
    """The ranges of the first `count` samples that are drawn: those of `ranges`, then those that follow, and so on.

    At least one of `ranges` has a sample.
    """
    in_turn = list(ranges)
    while True:
        for drawn in in_turn:
            if count <= 0:
                return
            if drawn.size:
                yield drawn if drawn.size <= count else _first_part(drawn, count)
            count -= drawn.size
        in_turn = list(map(following, in_turn))


def moved_past(ranges: Sequence[SampleRange], count: int) -> list[SampleRange]:
    """The ranges moved on to what each has left after the first `count` samples that are drawn from all of them.

    Each has the `count` of before: they can be drawn from without end.
    """
    moved = list(ranges)
    while True:
        for place, drawn in enumerate(moved):
            if drawn.size > count:
                moved[place] = _moved_within(drawn, count)
                return moved
            count -= drawn.size
            moved[place] = following(drawn)


def _first_part(drawn: SampleRange, size: int) -> SampleRange:
    """The first `size` of its samples, of which it has more."""
    end = _place_of(drawn, size)
    without = [left_out for left_out in drawn.without if left_out.start < end]
    return drawn.model_copy(update={"count": end - drawn.start, "without": without})


def _moved_within(drawn: SampleRange, size: int) -> SampleRange:
    """As many places, from the one of its sample number `size`."""
    start = _place_of(drawn, size)
    without = [left_out for left_out in drawn.without if left_out.start >= start]
    return drawn.model_copy(update={"start": start, "without": without})


def _place_of(drawn: SampleRange, number: int) -> int:
    """The place of its sample number `number`, counted from 0; it has that many."""
    for piece in pieces_of(drawn):
        if number < piece.count:
            return piece.start + number
        number -= piece.count
    raise AssertionError("The range has no such sample.")
