"""Measures the model's skills on held-out questions: `python -m models.small.recipe.measure`. The last line is JSON."""

# mypy: disable-error-code="no-untyped-call"

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from models.small.recipe.chat_format import END, PAD, make_tokenizer
from models.small.recipe.curriculum import SKILLS
from models.small.recipe.exercises import draw_exercise
from models.small.recipe.playing import play

MODEL = Path(__file__).parent.parent
QUESTIONS = 200
MOST_NEW_TOKENS = 192
SAMPLED_AT_ONCE = 100


def sampled(model: Qwen3ForCausalLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    """What the model says at temperature 1, from prompts of any lengths."""
    settings = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=END, pad_token_id=PAD)
    settings.max_new_tokens = MOST_NEW_TOKENS
    untyped: Any = model
    replies = []
    for first in range(0, len(prompts), SAMPLED_AT_ONCE):
        part = prompts[first : first + SAMPLED_AT_ONCE]
        longest = max(map(len, part))
        token_ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in part])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in part])
        with torch.inference_mode():
            said = untyped.generate(token_ids, attention_mask=mask, generation_config=settings)
        replies += [[token for token in row if token != PAD] for row in said[:, longest:].tolist()]
    return replies


def scores_of(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: int,
    seed: int,
    thinks: bool,
    console: Console,
) -> dict[str, float]:
    """The share of held-out questions of each skill that the model answers right, sampled at temperature 1."""
    torch.manual_seed(seed)
    model.eval()
    scores = {}
    for name, skill in SKILLS.items():
        draw = random.Random(seed)
        exercises = [draw_exercise(skill, draw, held_out=True) for _ in range(questions)]
        with console.status(f"Playing {questions} questions of {name}"):
            plays = play(partial(sampled, model), tokenizer, exercises, thinks)
        scores[name] = sum(one.right for one in plays) / questions
        console.print(f"{name}: {scores[name]:.1%} of {questions} right")
    return scores


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = MODEL,
    questions: Annotated[int, typer.Option(min=1, help="Of each skill.")] = QUESTIONS,
    seed: Annotated[int, typer.Option(min=0, help="Of the questions and the sampling.")] = 0,
    thinks: Annotated[bool, typer.Option(help="Whether the model may think.")] = True,
) -> None:
    """Plays held-out questions of each skill with the saved weights."""
    console = Console()
    loaded = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    scores = scores_of(loaded, make_tokenizer(), questions, seed, thinks, console)
    console.print(
        json.dumps({"questions": questions, "seed": seed, "thinks": thinks, "right": scores}),
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


if __name__ == "__main__":
    typer.run(main)
