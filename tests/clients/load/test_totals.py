"""The metrics of a load test: counted, sent by workers, summed by the master."""

from collections import Counter

import msgpack
import pytest

from rollout_load.outcomes import SLOT_S, LoadOutcome, LoadTotals


def outcome(tokens: int = 10) -> LoadOutcome:
    return LoadOutcome(2, 3, tokens, Counter({"completed": 2}), Counter({"generation": 1}))


def test_outcomes_add_up() -> None:
    totals = LoadTotals()
    totals.add(outcome(), 100.0)
    totals.add(outcome(), 104.9)
    totals.add(outcome(), 105.0)
    assert (totals.rollouts, totals.turns, totals.tokens) == (6, 9, 30)
    assert (totals.statuses, totals.errors) == ({"completed": 6}, {"generation": 3})
    assert totals.slots == {20: 20, 21: 10}


def test_what_workers_send_adds_up_at_the_master() -> None:
    worker, other = LoadTotals(pushes=1), LoadTotals()
    worker.add(outcome(), 100.0)
    other.add(outcome(5), 100.0)
    master = LoadTotals()
    for each in (worker, other):
        # As locust's connection carries it.
        master.merge(LoadTotals.of_message(msgpack.loads(msgpack.dumps(each.message()))))
    assert (master.rollouts, master.turns, master.tokens, master.pushes) == (4, 6, 15, 1)
    assert (master.statuses, master.errors, master.slots) == ({"completed": 4}, {"generation": 2}, {20: 15})


def test_cleared_totals_are_new_ones() -> None:
    totals = LoadTotals(pushes=1)
    totals.add(outcome(), 100.0)
    totals.clear()
    assert totals == LoadTotals()


@pytest.mark.parametrize(
    ("tokens", "held"),
    [
        ([], None),
        ([7, 10, 10, 7], None),
        ([7, 10, 10, 10, 8, 7], 0.8),
        ([7, 10, 30, 5, 5, 5, 5, 10, 10, 7], 0.5),
        # A quarter without an answer is one without tokens, not one that is not there.
        ([7, 10, 10, 10, 0, 7], 0.0),
    ],
)
def test_a_soak_compares_its_last_quarter_with_the_first_without_the_cut_slots(
    tokens: list[int], held: float | None
) -> None:
    totals = LoadTotals()
    for slot, count in enumerate(tokens):
        if count:
            totals.add(outcome(count), slot * SLOT_S)
    assert totals.last_quarter_over_first() == held
