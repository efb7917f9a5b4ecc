"""Which parts are killed in which third of a soak."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.endurance.soak.slots import FEWEST_PUSHES, SHORTEST_SLOT_S, THIRDS, Slot, slots

KINDS = ("generator", "ingress", "store")


def test_a_short_run_kills_the_first_part_once_in_each_third() -> None:
    assert slots(120, KINDS) == [
        Slot("generator", 0, 40.0, 4),
        Slot("generator", 1, 80.0, 4),
        Slot("generator", 2, 120.0, 4),
    ]


def test_each_third_of_a_longer_run_kills_the_same_parts_in_the_same_order() -> None:
    assert [(slot.kind, slot.third, slot.ends_after_s, slot.fewest_pushes) for slot in slots(240, KINDS)] == [
        ("generator", 0, 40.0, 2),
        ("ingress", 0, 80.0, 2),
        ("generator", 1, 120.0, 2),
        ("ingress", 1, 160.0, 2),
        ("generator", 2, 200.0, 2),
        ("ingress", 2, 240.0, 2),
    ]


@given(seconds=st.floats(1, 10_000), kinds=st.lists(st.text(), min_size=1, max_size=9))
def test_a_run_ends_with_its_last_slot_and_each_third_has_pushes_enough(seconds: float, kinds: list[str]) -> None:
    made = slots(seconds, kinds)
    ends = [0.0, *(slot.ends_after_s for slot in made)]
    assert abs(ends[-1] - seconds) < 1e-6 * seconds
    assert all(end - begin > 0.999 * min(SHORTEST_SLOT_S, seconds / THIRDS) for begin, end in pairwise(ends))
    for third in range(THIRDS):
        of_third = [slot for slot in made if slot.third == third]
        assert [slot.kind for slot in of_third] == kinds[: len(of_third)]
        assert sum(slot.fewest_pushes for slot in of_third) >= FEWEST_PUSHES
