"""What a request's priority is worth."""

import pytest

from rollout_client.contract.base import Priority
from service.access.keys import ANYBODY
from service.scheduling.priority import counts_by_priority, share_of, weight_of


@pytest.mark.parametrize(
    ("priority", "weight"), [("interactive", 16.0), ("train", 1.0), ("batch", 0.0625), (2.5, 2.5), (1, 1.0)]
)
def test_a_priority_is_a_weight_in_proportion_to_training(priority: Priority, weight: float) -> None:
    assert weight_of(priority) == weight


@pytest.mark.parametrize(
    ("priority", "fills_gaps"), [("interactive", False), ("train", False), ("batch", True), (0.0625, False)]
)
def test_batch_alone_fills_gaps_and_a_number_of_its_weight_shares(priority: Priority, fills_gaps: bool) -> None:
    assert share_of("id", priority, ANYBODY).fills_gaps is fills_gaps


def test_counts_by_weight_are_counts_by_priority_in_which_no_class_is_missing() -> None:
    counts = counts_by_priority({16.0: 2, 0.0625: 1, 2.5: 3, 0.5: 4})
    assert counts == {"interactive": 2, "train": 0, "batch": 1, "other": 7}
