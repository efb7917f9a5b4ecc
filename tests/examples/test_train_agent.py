"""The figures of `make train-agent`."""

import pytest

from examples.train_agent import gain, mean_reward, summary
from examples.train_grpo import Curve
from rollout_client.agent_runner import AgentRollout


def test_the_summary_has_the_first_and_the_last_share_and_the_gain_in_points() -> None:
    curve = Curve("", held_out={0: 0.31252, 10: 0.9, 20: 0.75})
    assert gain(curve) == pytest.approx(0.43748)
    assert summary(curve) == {"held_out_before": 0.3125, "held_out_after": 0.75, "gain_points": 43.7}


def test_the_reward_of_a_failed_run_is_unknown_and_not_zero() -> None:
    error = TimeoutError("the run was ended")
    rollouts = [AgentRollout(0, 0, [], 1.0), AgentRollout(0, 1, [], 0.0), AgentRollout(0, 2, [], None, error)]
    assert mean_reward(rollouts) == 0.5
    with pytest.raises(TimeoutError, match="the run was ended"):
        mean_reward(rollouts[2:])
