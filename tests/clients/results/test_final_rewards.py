"""Which rollouts have a final reward."""

import pytest

from rollout_client.results import (
    RolloutsNotFinal,
    final_reward,
    is_clipped,
    last_finish_reason,
)
from tests.clients.message_logs import failed, generated, given_message, rollout


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


def test_a_rollout_is_clipped_whose_last_response_its_length_has_cut() -> None:
    whole, cut, interrupted = (generated(1, finish_reason=reason) for reason in ("stop", "length", None))
    observed = given_message(2, role="environment")
    logs = [[cut, observed], [cut, observed, whole], [whole, cut], [cut, interrupted], [observed], []]
    assert [is_clipped(rollout(*log)) for log in logs] == [True, False, True, False, False, False]
    assert [last_finish_reason(rollout(*log)) for log in logs] == ["length", "stop", "length", None, None, None]


def test_the_error_counts_the_rollouts_without_a_final_reward_and_explains_the_first() -> None:
    samples = [failed(generated(1), idx=4, generation_index=2), rollout(generated(1), status="deadline")]
    error = RolloutsNotFinal(samples, 5)
    assert error.samples == samples
    assert str(error) == (
        "2 of 5 rollouts have no final reward; idx 4 of task math, generation 2: generation error: The replica died."
    )
    assert str(RolloutsNotFinal(samples[1:], 1)).endswith("; idx 0 of task math, generation 0: deadline")
