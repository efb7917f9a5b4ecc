"""A step of `make train-agent TASK=harbor`: sandboxes, verifiers, sessions, gradients, a push."""

from pathlib import Path

import pytest
from rich.console import Console

from examples.task_configs import CONFIG
from examples.train_agent_harbor import RECIPE, trained_on
from tests.deployments.agents.test_harbor_program import works
from tests.paths import REPOSITORY

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not works(), reason="bubblewrap does not work on this machine"),
]
ROUNDING = 0.02
"""Bound of the mean distance of log-probabilities: bfloat16 gives less than half of it."""


def test_a_step_trains_on_what_the_sessions_recorded_and_the_verifiers_judged(tmp_path: Path) -> None:
    recipe = RECIPE._replace(steps=1, prompts_per_step=8)
    curve = trained_on(tmp_path, REPOSITORY / CONFIG, recipe, tasks=40, seed=0, console=Console(stderr=True))
    assert [*curve.held_out] == [0, 1]
    assert 0 < curve.reward[1] < 1
    assert 0 < curve.difference[1] < ROUNDING
    # The shortest answer with a code block has more than 20 tokens.
    assert curve.tokens[1] > 20 * recipe.prompts_per_step * recipe.num_generations
