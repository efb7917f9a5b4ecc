"""Measures the model's skills on held-out questions: `python -m models.small.recipe.measure`. The last line is JSON."""

# mypy: disable-error-code="no-untyped-call"

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from models.recipes import sampled
from models.small.recipe.chat_format import END, make_tokenizer
from models.small.recipe.curriculum import SKILLS
from models.small.recipe.exercises import draw_exercise
from models.small.recipe.playing import play

MODEL = Path(__file__).parent.parent
QUESTIONS = 200
MOST_NEW_TOKENS = 192
SAMPLED_AT_ONCE = 100


def replies(model: Qwen3ForCausalLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    parts = (prompts[first : first + SAMPLED_AT_ONCE] for first in range(0, len(prompts), SAMPLED_AT_ONCE))
    return [reply for part in parts for reply in sampled(model, part, END, MOST_NEW_TOKENS)]


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
            plays = play(partial(replies, model), tokenizer, exercises, thinks)
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
