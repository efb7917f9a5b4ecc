"""What a request's priority is worth."""

import pytest

from rollout_client.contract.base import Priority
from service.scheduling.fair_queue import _weight_of, counts_by_priority


@pytest.mark.parametrize(
    ("priority", "weight"), [("interactive", 16.0), ("train", 1.0), ("batch", 0.0625), (2.5, 2.5), (1, 1.0)]
)
def test_a_priority_is_a_weight_in_proportion_to_training(priority: Priority, weight: float) -> None:
    assert _weight_of(priority) == weight


def test_counts_by_weight_are_counts_by_priority_in_which_no_class_is_missing() -> None:
    counts = counts_by_priority({16.0: 2, 0.0625: 1, 2.5: 3, 0.5: 4})
    assert counts == {"interactive": 2, "train": 0, "batch": 1, "other": 7}
