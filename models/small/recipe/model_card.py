"""The README of the model, with its figures."""

import time
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from transformers import Qwen3ForCausalLM

from models.small.recipe.chat_format import MARKERS, SPECIAL_TOKENS
from models.small.recipe.curriculum import COPYING_STEPS, MOST_QUESTIONS, THINKING_SHARE, TOKENS_PER_BATCH
from models.small.recipe.exercises import HELD_OUT_SHARE
from models.small.recipe.training import (
    DECAY_SHARE,
    GAP_SHARE,
    MATRIX_LEARNING_RATE,
    OTHER_LEARNING_RATE,
    WARMUP_STEPS,
    WEIGHT_DECAY,
)

CARD = Path(__file__).parent / "model_card.md"
QUESTIONS = {
    "addition": "What is 583 + 47?",
    "json": "Answer in JSON with the keys age, name: Mirato Bafe is 34 years old, ...",
    "python": "Write a Python function f(x) that returns 3 * x + 4. Reply with one code block.",
    "calculator": "A box holds 24 pens. How many pens are in 130 boxes?",
    "search": "In which country does Mirato Bafe live?",
    "any_tool": "Set the lamp with room Bafe and level 7.",
}


def write_model_card(
    output: Path,
    model: Qwen3ForCausalLM,
    scores: Mapping[str, float],
    scores_without_thoughts: Mapping[str, float],
    questions: int,
    steps: int,
    seed: int,
    seconds: float,
) -> None:
    config = model.config
    skills = [
        f"| {name} | {QUESTIONS[name]} | {score:.1%} | {scores_without_thoughts[name]:.1%} |"
        for name, score in scores.items()
    ]
    card = CARD.read_text(encoding="utf-8").format(
        parameters=model.num_parameters(),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        mlp=config.intermediate_size,
        positions=config.max_position_embeddings,
        megabytes=(output / "model.safetensors").stat().st_size / 1e6,
        specials=len(SPECIAL_TOKENS),
        markers=len(MARKERS),
        questions=questions,
        held_out=HELD_OUT_SHARE,
        skills="\n".join(skills),
        steps=steps,
        seed=seed,
        tokens=TOKENS_PER_BATCH,
        copying_steps=COPYING_STEPS,
        most_questions=MOST_QUESTIONS,
        thinking_share=THINKING_SHARE,
        gap_share=GAP_SHARE,
        matrix_rate=MATRIX_LEARNING_RATE,
        other_rate=OTHER_LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        warmup=WARMUP_STEPS,
        decay_share=DECAY_SHARE,
        minutes=seconds / 60,
        processor_minutes=time.process_time() / 60,
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        transformers_version=transformers.__version__,
    )
    (output / "README.md").write_text(card, encoding="utf-8")
