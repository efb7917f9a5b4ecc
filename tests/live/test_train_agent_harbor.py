"""A step of `examples/train_agent_harbor.py`: sandboxes, verifiers, sessions, gradients, a push."""

from pathlib import Path

import pytest

from examples.task_configs import CONFIG
from examples.train_agent import RECIPE
from examples.train_agent_harbor import trained_on
from examples.train_grpo import parser
from tests.deployments.agents.test_harbor_program import works
from tests.paths import REPOSITORY

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not works(), reason="bubblewrap does not work on this machine"),
]
ROUNDING = 0.02
"""Bound of the mean distance of log-probabilities: bfloat16 gives less than half of it."""


def test_a_step_trains_on_what_sessions_recorded_and_verifiers_judged(tmp_path: Path) -> None:
    step = ["--steps=1", "--prompts-per-step=8", "--num-generations=8"]
    before, after = trained_on(tmp_path, REPOSITORY / CONFIG, parser().parse_args([*RECIPE, *step]), tasks=40)
    assert 0 <= before["held_out"] <= 1
    assert 0 < after["reward"] < 1
    assert 0 < after["difference"] < ROUNDING
    assert 0 <= after["held_out"] <= 1
