"""Which rollouts have a final reward."""

import pytest

from rollout_client.results.final_rewards import RolloutsNotFinal, final_reward
from tests.clients.message_logs import failed, generated, rollout


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("completed", 2.5),
        ("truncated", 2.5),
        ("max_turns", 2.5),
        ("deadline", None),
        ("cancelled", None),
        ("stale", None),
    ],
)
def test_a_reward_is_final_unless_the_rollout_was_cut_off(status: str, expected: float | None) -> None:
    assert final_reward(rollout(generated(1), reward=2.5, status=status)) == expected


def test_a_failed_rollout_has_no_final_reward() -> None:
    assert final_reward(failed(generated(1))) is None


def test_the_error_counts_the_rollouts_without_a_final_reward_and_explains_the_first() -> None:
    samples = [failed(generated(1), idx=4, generation_index=2), rollout(generated(1), status="deadline")]
    error = RolloutsNotFinal(samples, 5)
    assert error.samples == samples
    assert str(error) == (
        "2 of 5 rollouts have no final reward; idx 4 of task math, generation 2: generation error: The replica died."
    )
    assert str(RolloutsNotFinal(samples[1:], 1)).endswith("; idx 0 of task math, generation 0: deadline")
