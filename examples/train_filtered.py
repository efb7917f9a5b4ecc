"""Trains the embedded model twice as `train_grpo` does, with and without `keep.where`, and compares the tokens.

Learn from it what `keep.where` saves: both trainings are drawn by the tokens that they generated.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import typer
from rich.console import Console

from examples.train_grpo import (
    EMBEDDED,
    Curve,
    SeedOption,
    UrlOption,
    config_of_model,
    running_service,
    train,
)
from service.startup.generated_config import EMBEDDED_MODEL

KEEP_ONE_IN = 6
"""A step keeps one group that teaches for so many prompts of the other training: about as many as teach late in a
training, when few do."""
MEASUREMENTS = 5
COMPARED: dict[str, dict[str, Any]] = {
    "all groups": {},
    "groups that teach": {"keep_groups": EMBEDDED.prompts_per_step // KEEP_ONE_IN},
}
"""Fields of the recipes of both trainings, by name."""


def main(
    url: UrlOption = None,
    steps: Annotated[int, typer.Option(min=MEASUREMENTS)] = 40,
    seed: SeedOption = 0,
    curve: Annotated[Path, typer.Option(help="File for the curves.")] = Path("train-filtered.png"),
) -> None:
    """Prints as its last line, in JSON, the tokens that each training generated until both had reached an accuracy."""
    console = Console(stderr=True)
    folder = str(EMBEDDED_MODEL)
    recipe = EMBEDDED._replace(steps=steps, steps_between_measurements=steps // MEASUREMENTS)
    with running_service(lambda: config_of_model(folder, 0), url, console) as client:
        curves = {
            name: train(client, folder, recipe._replace(**fields), False, seed, console)
            for name, fields in COMPARED.items()
        }
    draw(curves, curve)
    console.print(f"The curves are in {curve}.")
    typer.echo(json.dumps(compared(curves)))


def draw(curves: dict[str, Curve], path: Path, measured: str = "accuracy held out, at temperature 1") -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, curve in curves.items():
        axes.plot([curve.tokens[step] for step in curve.held_out], [*curve.held_out.values()], "o-", label=name)
    axes.axhline(reached(*curves.values()), color="tab:gray", linestyle=":")
    axes.set(xlabel="tokens generated for training", ylabel=measured, ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def compared(curves: dict[str, Curve]) -> dict[str, float]:
    """The tokens of each training until both had reached an accuracy, and the share that the second took."""
    accuracy = reached(*curves.values())
    tokens = {name: tokens_until(accuracy, curve) for name, curve in curves.items()}
    without, with_setting = tokens.values()
    return {
        "accuracy": round(accuracy, 4),
        **{f"tokens_of_{name.replace(' ', '_')}": round(count) for name, count in tokens.items()},
        "share": round(with_setting / without, 3),
    }


def reached(*curves: Curve) -> float:
    """The highest accuracy that all have reached."""
    return min(max(curve.held_out.values()) for curve in curves)


def tokens_until(accuracy: float, curve: Curve) -> float:
    """Tokens until the accuracy was first reached, between two measurements in proportion."""
    measured = [(curve.tokens[step], share) for step, share in curve.held_out.items()]
    for (tokens_before, before), (tokens, share) in pairwise(measured):
        if share >= accuracy:
            return tokens_before + (tokens - tokens_before) * max(0.0, accuracy - before) / (share - before)
    raise ValueError("The accuracy was not reached.")


if __name__ == "__main__":
    typer.run(main)
