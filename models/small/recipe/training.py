"""The model and its training: Muon for the matrices, AdamW for embeddings and norms."""

# mypy: disable-error-code="no-untyped-call"

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from models.recipes import NO_LOSS, PAD, Conversation, generation_config, padded
from models.small.recipe.chat_format import END, MAX_POSITIONS, VOCABULARY_SIZE

MATRIX_LEARNING_RATE = 0.02
OTHER_LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.01
WARMUP_STEPS = 20
DECAY_SHARE = 0.4
LAST_FACTOR = 0.05
GRADIENT_NORM = 1.0
GAP_SHARE = 0.1
"""Of the batches, how many have a gap in the positions of their tokens, as a long text between two others leaves:
the model has seen all distances of its context, though no conversation is as long."""


def make_model() -> Qwen3ForCausalLM:
    """The untrained model; heads of 32, the smallest size that vLLM's attention for processors takes."""
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = generation_config(END)
    return model


def positions(length: int, gap_at: int, gap: int) -> torch.Tensor:
    """From 0 on, with so many left out before the token `gap_at`."""
    places = torch.arange(length)
    return torch.where(places < gap_at, places, places + gap)[None]


def summed_loss(model: Qwen3ForCausalLM, batch: Sequence[Conversation], draw: random.Random) -> tuple[Any, int]:
    """The loss in nats over all tokens to learn, and how many these are."""
    token_ids = padded([one.token_ids for one in batch], PAD)
    labels = padded([one.labels for one in batch], NO_LOSS)[:, 1:]
    length = token_ids.shape[1]
    gap = draw.randrange(MAX_POSITIONS - length) if draw.random() < GAP_SHARE else 0
    untyped: Any = model
    hidden = untyped.model(
        input_ids=token_ids,
        # Without a mask, a gap in the positions would be taken for the beginning of another text.
        attention_mask=torch.ones_like(token_ids),
        position_ids=positions(length, draw.randrange(1, length), gap).expand_as(token_ids),
    ).last_hidden_state[:, :-1]
    learnt = labels != NO_LOSS
    logits = untyped.lm_head(hidden[learnt])
    return torch.nn.functional.cross_entropy(logits.float(), labels[learnt], reduction="sum"), int(learnt.sum())


def optimizers_of(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    named = [(name, parameter) for name, parameter in model.named_parameters()]
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    others = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=MATRIX_LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    return [muon, torch.optim.AdamW(others, OTHER_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)]


def learning_rate_factor(step: int, steps: int) -> float:
    """Rises in a warm-up, stays at 1, and falls over the last `DECAY_SHARE` of the steps."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    left = (steps - step) / (DECAY_SHARE * steps)
    return LAST_FACTOR + (1 - LAST_FACTOR) * min(1.0, left)


def train(
    model: Qwen3ForCausalLM, steps_of_batches: Iterable[list[list[Conversation]]], steps: int, seed: int
) -> Iterator[tuple[int, list[float]]]:
    """Takes one step after another, each on all of its batches, and yields the step and each batch's mean loss."""
    draw = random.Random(seed)
    optimizers = optimizers_of(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
        for optimizer in optimizers
    ]
    model.train()
    for step, batches in enumerate(steps_of_batches):
        learnt = sum(label != NO_LOSS for batch in batches for one in batch for label in one.labels[1:])
        losses = []
        for batch in batches:
            # Matrix products in bfloat16 take two thirds of the time; the weights stay in float32.
            with torch.autocast("cpu", torch.bfloat16):
                loss, tokens = summed_loss(model, batch, draw)
            (loss / learnt).backward()
            losses.append(loss.item() / tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        yield step, losses
