"""The training of `models/small` on batches of its own curriculum."""

import random
from typing import Any

import pytest
import torch

from models.recipes import NO_LOSS, Conversation, padded
from models.small.recipe.chat_format import make_tokenizer
from models.small.recipe.curriculum import conversation, steps_of_batches
from models.small.recipe.text_skills import copying
from models.small.recipe.training import (
    WARMUP_STEPS,
    learning_rate_factor,
    make_model,
    positions,
    summed_loss,
    train,
)

pytestmark = pytest.mark.slow


def test_rows_are_padded_at_their_ends() -> None:
    assert padded([[1, 2], [3]], 9).tolist() == [[1, 2], [3, 9]]


def test_a_gap_leaves_out_positions_before_one_token() -> None:
    assert positions(4, 2, 100).tolist() == [[0, 1, 102, 103]]


def test_the_learning_rate_rises_stays_and_falls() -> None:
    factors = [learning_rate_factor(step, 1000) for step in range(1000)]
    assert factors[: WARMUP_STEPS - 1] == sorted(factors[: WARMUP_STEPS - 1])
    assert set(factors[WARMUP_STEPS:600]) == {1.0}
    assert factors[600:] == sorted(factors[600:], reverse=True)
    assert 0.05 < factors[-1] < 0.06


def logits_of(model: Any, ids: list[int], places: torch.Tensor) -> torch.Tensor:
    token_ids = torch.tensor([ids])
    with torch.no_grad():
        logits: torch.Tensor = model(token_ids, attention_mask=torch.ones_like(token_ids), position_ids=places).logits
    return logits[0, -1]


def test_a_gap_hides_no_token_from_those_after_it() -> None:
    torch.manual_seed(0)
    model: Any = make_model()
    model.eval()
    places = positions(6, 3, 1000)
    before, after = (logits_of(model, [first, 1, 2, 3, 4, 5], places) for first in (7, 8))
    assert not torch.equal(before, after)
    torch.testing.assert_close(before, logits_of(model, [7, 1, 2, 3, 4, 5], places + 500), rtol=1e-3, atol=1e-3)


def test_only_labels_count_whatever_is_padded() -> None:
    torch.manual_seed(0)
    model, draw = make_model(), random.Random(0)
    short = Conversation([1, 2, 3], [NO_LOSS, 2, NO_LOSS])
    long = Conversation([1, 2, 3, 4, 5], [NO_LOSS, NO_LOSS, 3, 4, NO_LOSS])
    alone = [summed_loss(model, [one], draw) for one in (short, long)]
    together = summed_loss(model, [short, long], draw)
    assert together[1] == alone[0][1] + alone[1][1] == 3
    torch.testing.assert_close(together[0], alone[0][0] + alone[1][0], rtol=1e-3, atol=1e-3)


def test_training_lowers_the_loss_and_equal_seeds_give_equal_weights() -> None:
    tokenizer = make_tokenizer()
    batch = [conversation(tokenizer, copying, random.Random(seed)) for seed in range(4)]
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        model = make_model()
        losses = [loss for _, [loss] in train(model, [[batch]] * 12, steps=12, seed=0)]
        runs.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
    assert runs[0][0][-1] < runs[0][0][0] - 1
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


def test_each_step_has_a_batch_with_tools_and_one_without() -> None:
    tokenizer = make_tokenizer()
    for short, long in steps_of_batches(tokenizer, 3, seed=0):
        texts = [[str(tokenizer.decode(one.token_ids)) for one in batch] for batch in (short, long)]
        assert not any("<tools>" in text for text in texts[0])
        assert all("<tools>" in text for text in texts[1])
