"""The comparison of `make train-filtered`."""

from pathlib import Path

import pytest

from examples.train_filtered import compared, draw, tokens_until
from examples.train_grpo import Curve

# Importing what trains takes seconds.
pytestmark = pytest.mark.slow
ALL_GROUPS = Curve("", held_out={0: 0.5, 2: 0.7, 4: 0.9}, tokens={0: 0, 2: 100, 4: 200})
FILTERED = Curve("", held_out={0: 0.5, 2: 0.8, 4: 0.75}, tokens={0: 0, 2: 60, 4: 140})


def test_two_trainings_are_compared_at_the_highest_accuracy_that_both_have_reached() -> None:
    expected = {"accuracy": 0.8, "tokens_of_all_groups": 150, "tokens_of_groups_that_teach": 60, "share": 0.4}
    assert compared({"all groups": ALL_GROUPS, "groups that teach": FILTERED}) == expected


def test_tokens_between_two_measurements_are_in_proportion() -> None:
    assert tokens_until(0.6, FILTERED) == pytest.approx(20)
    with pytest.raises(ValueError, match="not reached"):
        tokens_until(0.81, FILTERED)


def test_both_curves_are_drawn(tmp_path: Path) -> None:
    draw({"all groups": ALL_GROUPS, "groups that teach": FILTERED}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000
