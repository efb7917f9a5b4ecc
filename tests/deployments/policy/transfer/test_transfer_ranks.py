"""Ranks in a weight transfer, and what of an update's information each replica is told."""

from typing import Any

import pytest

from deployments.policy.failures import TransferRefused
from deployments.policy.transfer.weight_transfer import rank_offsets, shares, world_size
from rollout_client.contract.problems import FieldProblem


@pytest.mark.parametrize(
    ("workers", "offsets"), [([1], [1]), ([1, 1, 1], [1, 2, 3]), ([4, 4], [1, 5]), ([2, 1, 4], [1, 3, 4]), ([], [])]
)
def test_each_replica_begins_after_the_workers_of_those_before_it(workers: list[int], offsets: list[int]) -> None:
    assert rank_offsets(workers) == offsets


def test_the_trainer_and_all_workers_take_part() -> None:
    assert (world_size([2, 1, 4]), world_size([])) == (8, 1)


def test_every_replica_is_told_all_of_what_is_no_list() -> None:
    assert shares({"names": ["a"]}, [2, 1]) == [{"names": ["a"]}, {"names": ["a"]}]


def test_of_a_list_each_replica_is_told_the_entries_of_its_workers() -> None:
    entries: list[dict[str, Any]] = [{"worker": number} for number in range(7)]
    assert shares(entries, [2, 1, 4]) == [entries[:2], entries[2:3], entries[3:]]


@pytest.mark.parametrize("count", [2, 4])
def test_a_list_without_one_entry_for_each_worker_is_refused(count: int) -> None:
    with pytest.raises(TransferRefused) as refused:
        shares([{}] * count, [2, 1])
    problem = FieldProblem(field="update_info", message="3 workers take part, one entry each", value=count)
    assert refused.value.problems == (problem,)
