"""Starts the service, plays samples of several tasks in one request, shows some rollouts and metrics, stops everything.

Learn from it how one request mixes tasks, what a rollout looks like, and which metrics a request has.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from examples.stand_ins import stand_ins
from examples.task_configs import config_for, tasks_of
from rollout_client import RolloutClient, Sampling
from rollout_client.cli.transcript import metrics_table, transcript
from rollout_client.contract.rollouts import RolloutResponse, SampleResult
from service.startup.local_service import local_service, sentences_for_the_user

SAMPLES_PER_TASK = 16
NUM_GENERATIONS = 4
MAX_ROLLOUT_TURNS = 8
MAX_NEW_TOKENS = 128


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    model: Annotated[Path | None, typer.Option(help="Folder of a model, in place of the config's.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Of the config or of examples/tasks.yaml.")] = None,
) -> None:
    console = Console()
    tasks = task or tasks_of(model)
    with (
        sentences_for_the_user(console),
        stand_ins(config_for(config, model, tasks)) as served,
        local_service(served, console) as url,
    ):
        response = roll_out(url, tasks, console)
    show(response, tasks, console)


def roll_out(url: str, tasks: Sequence[str], console: Console) -> RolloutResponse:
    with RolloutClient(url) as client:
        samples = [sample for task in tasks for sample in client.example_samples(task, SAMPLES_PER_TASK)]
        console.print(f"Playing {len(samples)} samples of {' and '.join(tasks)}, {NUM_GENERATIONS} rollouts each")
        sampling = Sampling(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, seed=0)
        return client.rollout(
            samples,
            num_generations=NUM_GENERATIONS,
            sampling=sampling,
            max_rollout_turns=MAX_ROLLOUT_TURNS,
            progress=True,
        )


def show(response: RolloutResponse, tasks: Sequence[str], console: Console) -> None:
    """Prints the best and the worst rollout of each task, how many were rewarded, and the metrics of the request."""
    for task_name in tasks:
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
