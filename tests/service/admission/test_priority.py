"""What a request's priority is worth."""

import pytest

from rollout_client.priority_contract import Priority
from service.admission.priority import weight_of


@pytest.mark.parametrize(
    ("priority", "weight"), [("interactive", 16.0), ("train", 1.0), ("batch", 0.0625), (2.5, 2.5), (1, 1.0)]
)
def test_a_priority_is_a_weight_in_proportion_to_training(priority: Priority, weight: float) -> None:
    assert weight_of(priority) == weight
