"""Between which moments a version can be current, as its trainer knows."""

import pytest

from tests.endurance.soak.version_times import VersionTimes


@pytest.fixture
def times() -> VersionTimes:
    """Version 3 was sent at 10 and acknowledged at 12, version 5 sent at 20 and acknowledged at 23."""
    times = VersionTimes()
    for version, sent, acknowledged in ((3, 10, 12), (5, 20, 23)):
        times.send(version, sent)
        times.acknowledge(version, acknowledged)
    return times


@pytest.mark.parametrize(
    ("version", "begin", "end", "could"),
    [
        (0, 0, 1, True),
        (0, 12, 30, True),
        (0, 12.5, 30, False),
        (3, 0, 9.5, False),
        (3, 0, 10, True),
        (3, 23, 40, True),
        (3, 23.5, 40, False),
        (5, 0, 19.5, False),
        (5, 100, 101, True),
        (4, 0, 100, False),
    ],
)
def test_a_version_can_be_current_from_its_own_push_to_the_end_of_the_next(
    times: VersionTimes, version: int, begin: float, end: float, could: bool
) -> None:
    assert times.could_be_current(version, begin, end) is could


def test_a_refused_version_was_never_current_and_its_number_is_free_again(times: VersionTimes) -> None:
    times.send(6, 30)
    times.refuse(6)
    assert not times.could_be_current(6, 0, 100)
    assert times.newest == 5
    times.send(6, 40)
    assert times.could_be_current(6, 0, 100)
    assert not times.could_be_current(6, 0, 35)
