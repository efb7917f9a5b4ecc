"""Starts the service, plays samples of two tasks in one request, shows some rollouts and the metrics, stops everything.

Learn from it how one request mixes tasks, what a rollout looks like, and which metrics a request has.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollout_client import RolloutClient, Sampling
from rollout_client.cli.transcript import metrics_table, transcript
from rollout_client.contract import RolloutResponse, SampleResult
from service.local import local_service, sentences_for_the_user
from service.startup.config import read_config
from service.startup.ports import free_port

SAMPLES_PER_TASK = 16
NUM_GENERATIONS = 4
MAX_ROLLOUT_TURNS = 8


def main(config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml")) -> None:
    console = Console()
    with sentences_for_the_user(console), local_service(read_config(config, port=free_port()), console) as url:
        response = roll_out(url, console)
    show(response, console)


def roll_out(url: str, console: Console) -> RolloutResponse:
    with RolloutClient(url) as client:
        samples = [
            *client.example_samples("math", SAMPLES_PER_TASK),
            *client.example_samples("sliding_puzzle", SAMPLES_PER_TASK),
        ]
        console.print(f"Playing {len(samples)} samples of two tasks, {NUM_GENERATIONS} rollouts each")
        sampling = Sampling(temperature=1.0, max_new_tokens=64, seed=0)
        return client.rollout(
            samples,
            num_generations=NUM_GENERATIONS,
            sampling=sampling,
            max_rollout_turns=MAX_ROLLOUT_TURNS,
            progress=True,
        )


def show(response: RolloutResponse, console: Console) -> None:
    """Prints the best and the worst rollout of each task, how many were rewarded, and the metrics of the request."""
    for task_name in ("math", "sliding_puzzle"):
        rollouts = [sample for sample in response.samples if sample.task_name == task_name]
        for sample in best_and_worst(rollouts):
            console.print(transcript(sample))
        rewarded = sum(reward_of(sample) > 0 for sample in rollouts)
        failed = sum(sample.status == "error" for sample in rollouts)
        console.print(f"{task_name}: {rewarded} of {len(rollouts)} rollouts rewarded, {failed} failed\n")
    console.print(metrics_table(response.metrics))


def best_and_worst(rollouts: list[SampleResult]) -> list[SampleResult]:
    """The longest of the highest and the shortest of the lowest reward."""
    return [
        max(rollouts, key=lambda sample: (reward_of(sample), sample.metrics.turn_count)),
        min(rollouts, key=lambda sample: (reward_of(sample), sample.metrics.turn_count)),
    ]


def reward_of(sample: SampleResult) -> float:
    """The total reward; -1 for a rollout that failed, whose reward is unknown."""
    return -1.0 if sample.total_reward is None else sample.total_reward


if __name__ == "__main__":
    typer.run(main)
