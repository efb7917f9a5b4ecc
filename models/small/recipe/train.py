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

from models.small.recipe.chat_format import make_tokenizer
from models.small.recipe.curriculum import steps_of_batches
from models.small.recipe.measure import QUESTIONS, scores_of
from models.small.recipe.model_card import write_model_card
from models.small.recipe.training import make_model, train

STEPS = 1600


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
    model.bfloat16().save_pretrained(output)
    tokenizer.save_pretrained(output)
    # The weights are written readable by their owner alone, and a container may serve them as another user.
    (output / "model.safetensors").chmod(0o644)
    saved = Qwen3ForCausalLM.from_pretrained(output, dtype=torch.bfloat16)
    scores = scores_of(saved, tokenizer, questions, seed, thinks=True, console=console)
    without = scores_of(saved, tokenizer, questions, seed, thinks=False, console=console)
    write_model_card(output, saved, scores, without, questions, steps, seed, time.monotonic() - start)
    figures = json.dumps({"steps": steps, "seed": seed, "right": scores, "right_without_thoughts": without})
    console.print(figures, soft_wrap=True, highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
