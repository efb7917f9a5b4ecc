"""`rollout demo`: starts a service, plays samples of its tasks in one request, shows some rollouts and metrics, stops.

`pyproject.toml` makes it a plug-in of the client's command line. It is light to import: Ray comes with the call.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rollout_client import RolloutClient, Sampling
from rollout_client.cli.transcript import metrics_table, transcript
from rollout_client.contract.rollouts import RolloutResponse, SampleResult
from service.startup.serve_command import Gpus, Model, Tasks, make_importable

_SAMPLES_PER_TASK = 16
_NUM_GENERATIONS = 4
_MAX_ROLLOUT_TURNS = 8
_MAX_NEW_TOKENS = 128


def demo(model: Model = None, env: Tasks = None, gpus: Gpus = None) -> None:
    """Play some rollouts with a service of this machine that starts for them and stops after them."""
    from service.startup.config import BUNDLED, config_of, free_port
    from service.startup.generated_config import (
        ServedModel,
        environments_of,
        generated_config,
        gpus_or_all,
        model_and_tasks,
    )
    from service.startup.local_service import local_service, sentences_for_the_user

    console = Console()
    with sentences_for_the_user(console):
        name, asked = model_and_tasks(model, env)
        config = generated_config(ServedModel(name, gpus_or_all(gpus)), asked, {"port": free_port()}, {})
        tasks = [*environments_of(asked)]
        make_importable(Path.cwd())
        with local_service(config_of(config, BUNDLED / "serve_config.yaml"), console) as url:
            response = play(url, tasks, console)
        show(response, tasks, console)


def play(url: str, tasks: Sequence[str], console: Console, temperature: float = 1.0) -> RolloutResponse:
    """Plays samples of all tasks in one request."""
    with RolloutClient(url) as client:
        samples = [sample for task in tasks for sample in client.example_samples(task, _SAMPLES_PER_TASK)]
        console.print(f"Playing {len(samples)} samples of {' and '.join(tasks)}, {_NUM_GENERATIONS} rollouts each")
        sampling = Sampling(temperature=temperature, max_new_tokens=_MAX_NEW_TOKENS, seed=0)
        return client.rollout(
            samples,
            num_generations=_NUM_GENERATIONS,
            sampling=sampling,
            max_rollout_turns=_MAX_ROLLOUT_TURNS,
            progress=True,
        )


def show(response: RolloutResponse, tasks: Sequence[str], console: Console) -> None:
    """Prints the best and the worst rollout of each task, how many were rewarded, and the metrics of the request."""
    for task_name in tasks:
        rollouts = [sample for sample in response.samples if sample.task_name == task_name]
        # The longest of the highest and the shortest of the lowest reward.
        ranked = sorted(rollouts, key=lambda sample: (_reward_of(sample), sample.metrics.turn_count))
        for sample in (ranked[-1], ranked[0]):
            console.print(transcript(sample))
        rewarded = sum(_reward_of(sample) > 0 for sample in rollouts)
        failed = sum(sample.status == "error" for sample in rollouts)
        console.print(f"{task_name}: {rewarded} of {len(rollouts)} rollouts rewarded, {failed} failed\n")
    console.print(metrics_table(response.metrics))


def _reward_of(sample: SampleResult) -> float:
    """The total reward; -1 for a rollout that failed, whose reward is unknown."""
    return -1.0 if sample.total_reward is None else sample.total_reward
