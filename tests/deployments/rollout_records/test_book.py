"""Which records of rollouts are kept: bounds and owners."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.rollout_records.book import BYTES_PER_ENTRY, KeptRecord, RecordBook, RolloutUnknown


def record(rollout_id: str, owner: str = "", size: int = 0) -> KeptRecord:
    return KeptRecord(rollout_id, owner, bytes(size))


def book(most_records: int) -> RecordBook:
    return RecordBook(most_records * BYTES_PER_ENTRY)


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


def test_new_data_of_a_record_that_is_not_kept_any_more_is_left() -> None:
    kept = book(4)
    kept.put(record("a"))
    read = kept.record("a", "")
    kept.replace(read, KeptRecord("a", "", b"new"))
    assert kept.record("a", "").data == b"new"
    kept.replace(read, KeptRecord("a", "", b"late"))
    assert kept.record("a", "").data == b"new"


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("xy"), st.integers(0, 900)), max_size=40))
def test_the_bound_of_bytes_always_holds_and_the_sizes_add_up(puts: list[tuple[str, str, int]]) -> None:
    kept = book(4)
    for rollout_id, owner, size in puts:
        kept.put(record(rollout_id, owner, size))
        of_owners = [one for name in "xy" for one in kept.newest(name)]
        assert kept.size == sum(one.size for one in of_owners) <= 4 * BYTES_PER_ENTRY
