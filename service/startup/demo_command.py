"""`rollout demo`: starts a service, plays samples of its tasks in one request, shows some rollouts and metrics, stops.

`pyproject.toml` makes it a plug-in of the client's command line. It is light to import: Ray comes with the call.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollout_client import RolloutClient, Sampling
from rollout_client.cli.transcript import metrics_table, transcript
from rollout_client.contract.rollouts import RolloutResponse, SampleResult
from service.startup.commands import MODEL_HELP

SAMPLES_PER_TASK = 16
NUM_GENERATIONS = 4
MAX_ROLLOUT_TURNS = 8
MAX_NEW_TOKENS = 128


def demo(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    env: Annotated[list[str] | None, typer.Option(help="A task, as of rollout serve. Can be repeated.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs that the engines use; by default all of this machine.")
    ] = None,
) -> None:
    """Play some rollouts with a service of this machine that starts for them and stops after them."""
    from service.startup.config import BUNDLED, config_of, free_port
    from service.startup.generated_config import environments_of, generated_config
    from service.startup.local_service import local_service, sentences_for_the_user
    from service.startup.serve_command import embedded_model, make_importable, served_model, tasks_for

    console = Console()
    with sentences_for_the_user(console):
        asked = env or tasks_for(model)
        config = generated_config(served_model(model or embedded_model(asked), gpus), asked, {"port": free_port()}, {})
        tasks = [*environments_of(asked)]
        make_importable(Path.cwd())
        with local_service(config_of(config, BUNDLED / "serve_config.yaml"), console) as url:
            response = play(url, tasks, console)
        show(response, tasks, console)


def play(url: str, tasks: Sequence[str], console: Console, temperature: float = 1.0) -> RolloutResponse:
    """Plays samples of all tasks in one request."""
    with RolloutClient(url) as client:
        samples = [sample for task in tasks for sample in client.example_samples(task, SAMPLES_PER_TASK)]
        console.print(f"Playing {len(samples)} samples of {' and '.join(tasks)}, {NUM_GENERATIONS} rollouts each")
        sampling = Sampling(temperature=temperature, max_new_tokens=MAX_NEW_TOKENS, seed=0)
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
