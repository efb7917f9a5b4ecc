"""Makes the second embedded model from nothing: `python -m models.small.recipe.train --output models/small`.

A Qwen3 small enough to commit, with tools, thoughts and a context of 16,384 tokens. It is stopped while it still makes
mistakes, so that reinforcement learning has something to improve.
"""

import json
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import Qwen3ForCausalLM

from models.recipes import save, write_model_card
from models.small.recipe import curriculum, exercises, training
from models.small.recipe.chat_format import make_tokenizer
from models.small.recipe.curriculum import steps_of_batches
from models.small.recipe.measure import QUESTIONS, scores_of
from models.small.recipe.training import make_model, train

STEPS = 1600
CARD = Path(__file__).parent / "model_card.md"
ASKED = {
    "addition": "What is 583 + 47?",
    "json": "Answer in JSON with the keys age, name: Mirato Bafe is 34 years old, ...",
    "python": "Write a Python function f(x) that returns 3 * x + 4. Reply with one code block.",
    "calculator": "A box holds 24 pens. How many pens are in 130 boxes?",
    "search": "In which country does Mirato Bafe live?",
    "any_tool": "Set the lamp with room Bafe and level 7.",
}
"""A question of each skill."""


def main(
    output: Annotated[Path, typer.Option(help="Folder for the model; its files there are replaced.")],
    steps: Annotated[int, typer.Option(min=1, help="Training steps; more make a better model.")] = STEPS,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, data and evaluation.")] = 0,
    questions: Annotated[int, typer.Option(min=1, help="Of each skill, to measure it.")] = QUESTIONS,
    threads: Annotated[int, typer.Option(min=1, help="Processor cores to use.")] = 2,
) -> None:
    """Trains the model, measures it and writes it with its model card. The last line is JSON."""
    start, console = time.monotonic(), Console()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer, model = make_tokenizer(), make_model()
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*bar, TextColumn("{task.fields[losses]}"), console=console) as progress:
        task = progress.add_task("", total=steps, losses="")
        for step, (short, long) in train(model, steps_of_batches(tokenizer, steps, seed), steps, seed):
            if step % 10 == 0:
                losses = f"without tools {short:.3f}, with tools {long:.3f} nats a token"
                progress.update(task, losses=losses)
                if not console.is_terminal:
                    console.print(f"step {step}: {losses}, after {time.monotonic() - start:.0f} s")
            progress.advance(task)
    save(model, tokenizer, output)
    saved = Qwen3ForCausalLM.from_pretrained(output, dtype=torch.bfloat16)
    scores = scores_of(saved, tokenizer, questions, seed, thinks=True, console=console)
    without = scores_of(saved, tokenizer, questions, seed, thinks=False, console=console)
    skills = [f"| {name} | {ASKED[name]} | {score:.1%} | {without[name]:.1%} |" for name, score in scores.items()]
    measured = {"questions": questions, "steps": steps, "seed": seed, "skills": "\n".join(skills)}
    constants = vars(curriculum) | vars(exercises) | vars(training)
    write_model_card(output, CARD.read_text(encoding="utf-8"), saved, start, constants, **measured)
    figures = json.dumps({"steps": steps, "seed": seed, "right": scores, "right_without_thoughts": without})
    console.print(figures, soft_wrap=True, highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
