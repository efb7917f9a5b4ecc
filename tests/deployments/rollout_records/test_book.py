"""Which records of rollouts are kept: bounds, owners and time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.rollout_records.book import (
    BYTES_PER_ENTRY,
    KeptRecord,
    RecordBook,
)
from deployments.rollout_records.failures import RolloutUnknown
from deployments.rollout_records.settings import RolloutRecordsSettings


def record(rollout_id: str, owner: str = "", size: int = 0, ended_at: float = 0.0) -> KeptRecord:
    return KeptRecord(rollout_id, owner, bytes(size), ended_at)


def book(most_records: int, keep_s: float = 100.0) -> RecordBook:
    return RecordBook(RolloutRecordsSettings(keep_s=keep_s, max_bytes=most_records * BYTES_PER_ENTRY))


def ids(kept: RecordBook, owner: str = "") -> list[str]:
    return [record.rollout_id for record in kept.newest(owner)]


def test_a_record_is_its_owners_alone() -> None:
    kept = book(2)
    kept.put(record("a", "anna"))
    assert kept.record("a", "anna").rollout_id == "a"
    with pytest.raises(RolloutUnknown, match="rollout_id: there is no record of it"):
        kept.record("a", "ben")


def test_the_owner_who_has_the_most_loses_the_oldest() -> None:
    kept = book(3)
    for rollout_id, owner in (("b1", "ben"), ("a1", "anna"), ("a2", "anna"), ("a3", "anna")):
        kept.put(record(rollout_id, owner))
    assert ids(kept, "anna") == ["a3", "a2"]
    assert ids(kept, "ben") == ["b1"]


def test_a_record_that_is_larger_than_all_may_be_costs_no_other_one() -> None:
    kept = book(2)
    kept.put(record("a"))
    kept.put(record("b", size=2 * BYTES_PER_ENTRY))
    assert ids(kept) == ["a"]


def test_records_expire_in_the_order_in_which_they_came_whatever_the_clocks_of_the_ingresses_say() -> None:
    kept = book(9, keep_s=10)
    for second, ended_at in ((1.0, 5000.0), (2.0, -5000.0), (3.0, 3.0)):
        kept.put(replace(record(f"r{second:g}", ended_at=ended_at), kept_at=second))
    kept.expire(12.0)
    assert ids(kept) == ["r3"]
    kept.expire(13.0)
    assert (len(kept), kept.size) == (0, 0)


def test_new_data_of_a_record_that_is_not_kept_any_more_is_left() -> None:
    kept = book(4)
    kept.put(record("a"))
    read = kept.record("a", "")
    kept.replace_data(read, b"new")
    assert kept.record("a", "").data == b"new"
    kept.replace_data(read, b"late")
    assert kept.record("a", "").data == b"new"


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("xy"), st.integers(0, 900)), max_size=40))
def test_the_bound_of_bytes_always_holds_and_the_sizes_add_up(puts: list[tuple[str, str, int]]) -> None:
    kept = book(4)
    for second, (rollout_id, owner, size) in enumerate(puts):
        kept.put(record(rollout_id, owner, size, float(second)))
        of_owners = [one for name in "xy" for one in kept.newest(name)]
        assert kept.size == sum(one.size for one in of_owners) <= 4 * BYTES_PER_ENTRY
        assert len(kept) == len(of_owners)
        for name in "xy":
            times = [one.ended_at for one in kept.newest(name)]
            assert times == sorted(times, reverse=True)
