"""How long a step of an asynchronous training takes, against its longer part: `make bench-async`.

The loop is that of `examples/train_grpo_async.py`: the rollouts of the next step are played while the trainer trains,
and new weights are pushed after each step. Generators are simulated (`serve_config.scale.yaml`), and training is a time
in which the trainer sleeps, as if it computed on a GPU of its own: half as long as generating, as long, and twice as
long. The weights are those of the embedded model. The last line is JSON.
"""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.process_group import no_process_left
from rollout_client import RolloutClient, RolloutResponse
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service, sentences_for_the_user

SAMPLES = 256
TURNS = 8
NEW_TOKENS = 16
MAX_STALENESS = 1
ALONE = 3
"""Requests without a training beside them, right before each training, by which generating is measured."""
TRAINING_OVER_GENERATING = (0.5, 1.0, 2.0)
BOUND = 1.15
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Steps:
    """Of one training; times in seconds, medians over its steps."""

    generating_s: float
    """Of the rollouts of a step alone."""
    training_s: float
    step_s: float
    push_s: float
    stale_rate: float
    """Share of all rollouts that were cut off."""

    @property
    def over_longer(self) -> float:
        """The step in parts of the longer one of training and generating."""
        return self.step_s / max(self.training_s, self.generating_s)


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.scale.yaml"),
    model: Annotated[Path, typer.Option(help="The weights that are pushed.")] = Path("models/tiny"),
    steps: Annotated[int, typer.Option(min=2)] = 8,
) -> None:
    settings = read_config(config, port=free_port())
    with (
        sentences_for_the_user(console),
        no_process_left(),
        local_service(settings, console) as url,
        RolloutClient(url) as client,
    ):
        client.push_weights(model)
        play(client, client.policy().current)
        measured = []
        for factor in TRAINING_OVER_GENERATING:
            generating_s = median(generating(client) for _ in range(ALONE))
            measured.append(train(client, model, generating_s, factor * generating_s, steps))
    report(measured)


def play(client: RolloutClient, version: int) -> RolloutResponse:
    samples: list[dict[str, Any]] = [
        {"task_name": "three_tokens", "messages": [{"role": "user", "content": f"{number}"}]}
        for number in range(SAMPLES)
    ]
    return client.rollout(
        samples,
        sampling={"max_new_tokens": NEW_TOKENS},
        max_rollout_turns=TURNS,
        policy={"min_version": version, "max_staleness": MAX_STALENESS},
    )


def generating(client: RolloutClient) -> float:
    began = time.perf_counter()
    play(client, client.policy().current)
    return time.perf_counter() - began


def train(client: RolloutClient, model: Path, generating_s: float, training_s: float, steps: int) -> Steps:
    step_s, push_s, stale_rates = list[float](), list[float](), list[float]()
    version = client.policy().current
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(play, client, version)
        ahead.result()
        for _ in track(range(steps), f"Training for {training_s:.1f} s a step", console=console):
            began = time.perf_counter()
            response = ahead.result()
            ahead = thread.submit(play, client, version)
            stale_rates.append(float(response.metrics["stale_rate"]))  # type: ignore[arg-type]
            time.sleep(training_s)
            began_push = time.perf_counter()
            version = client.push_weights(model).version
            push_s.append(time.perf_counter() - began_push)
            step_s.append(time.perf_counter() - began)
        ahead.result()
    # The first step finds its rollouts there.
    stale_rate = sum(stale_rates) / len(stale_rates)
    return Steps(generating_s, training_s, median(step_s[1:]), median(push_s), stale_rate)


def report(measured: Sequence[Steps]) -> None:
    table = Table("training", "generating", "step", "push", f"step / the longer (<= {BOUND})", "cut off")
    for steps in measured:
        table.add_row(
            f"{steps.training_s:.2f} s",
            f"{steps.generating_s:.2f} s",
            f"{steps.step_s:.2f} s",
            f"{steps.push_s:.2f} s",
            f"{steps.over_longer:.3f}",
            f"{steps.stale_rate:.1%}",
        )
    console.print(table)
    figures = {
        "generating_s": [round(steps.generating_s, 3) for steps in measured],
        "training_s": [round(steps.training_s, 3) for steps in measured],
        "step_over_longer": [round(steps.over_longer, 3) for steps in measured],
        "push_s": [round(steps.push_s, 3) for steps in measured],
        "stale_rate": [round(steps.stale_rate, 4) for steps in measured],
    }
    typer.echo(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
