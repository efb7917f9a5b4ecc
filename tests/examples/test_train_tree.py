"""The trees of `make train-tree`: where they are forked, and how they are trained and compared."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.train_filtered import draw

from examples.train_grpo import Curve
from examples.train_tree import add_gradients, compared, fork_of, games, minibatches
from rollout_client.tensors import to_tensors
from tests.clients.message_logs import generated, given_message, rollout

# Importing what trains takes seconds.
pytestmark = pytest.mark.slow
GRPO = Curve("", held_out={0: 0.5, 2: 0.7, 4: 0.9}, tokens={0: 0, 2: 100, 4: 200})
TREES = Curve("", held_out={0: 0.5, 2: 0.8, 4: 0.75}, tokens={0: 0, 2: 60, 4: 140})


def test_both_trainings_are_compared_at_the_largest_share_that_both_have_solved() -> None:
    assert compared(GRPO, TREES) == {
        "solved_before": 0.5,
        "solved_by_grpo": 0.9,
        "solved_by_trees": 0.75,
        "tokens": 200,
        "solved_by_both": 0.8,
        "tokens_of_grpo": 150,
        "tokens_of_trees": 60,
    }


def test_both_curves_are_drawn(tmp_path: Path) -> None:
    draw({"GRPO": GRPO, "trees": TREES}, tmp_path / "curve.png", "games held out that are solved")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_a_trunk_is_forked_at_any_of_its_turns_into_a_leaf_of_its_own_group() -> None:
    log = [given_message(1), generated(2), given_message(3), generated(4)]
    trunk = rollout(*log, idx=7, rollout_id="r", task_name="sliding_puzzle")
    draw = random.Random(0)
    forks = [fork_of(trunk, draw) for _ in range(50)]
    assert {fork.fork.turn for fork in forks if fork.fork is not None} == {0, 1}
    assert {(fork.task_name, fork.idx) for fork in forks} == {("sliding_puzzle", 7)}


def test_games_have_their_seeds_of_the_draw() -> None:
    assert games(random.Random(1), 3) == games(random.Random(1), 3)
    assert all(game.extra_env_info["max_moves"] == 6 for game in games(random.Random(1), 3))


def test_parts_become_minibatches_of_almost_one_size() -> None:
    parts: Any = list(range(10))
    assert [len(some) for some in minibatches(parts)] == [3, 3, 3, 1]
    assert minibatches([]) == []


class Fixed(torch.nn.Module):
    """Gives every token one logit that is learned, and the others none."""

    def __init__(self) -> None:
        super().__init__()
        self.logit = torch.nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        logits = torch.zeros(*input_ids.shape, 9)
        logits[..., 4] = 1.0
        return type("Output", (), {"logits": logits * self.logit})


def test_the_gradient_of_a_tree_counts_each_token_once_with_its_advantage() -> None:
    uniform = -2.1972246  # log(1 / 9)
    trunk, fork = (
        rollout(given_message(1), generated(4, logprob=uniform), given_message(3), one)
        for one in (generated(4, logprob=uniform), generated(5, logprob=uniform))
    )
    rows = to_tensors([trunk, fork], pad_token_id=0, merge="prefix").merged
    model: Any = Fixed()
    gained = torch.tensor([[0.0, 0.5, 0.0, 2.0, -1.0]])
    assert add_gradients(model, rows, gained, tokens=3) == pytest.approx(0, abs=1e-6)
    # d log p(4) = 8/9, d log p(5) = -1/9: minus the sum of each with its advantage, over three tokens.
    assert model.logit.grad.item() == pytest.approx(-(0.5 * 8 / 9 + 2 * 8 / 9 + 1 / 9) / 3)
