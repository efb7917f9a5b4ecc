"""`rollout play` and `rollout view`: transcripts of rollouts that are played now, or read from a file."""

from pathlib import Path
from typing import Annotated

import typer

from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.cli.options import Connection, Seed, Task, command
from rollout_client.cli.output import AsJson, show
from rollout_client.cli.run.totals import Totals
from rollout_client.cli.transcript import metrics_table, totals_table, transcript
from rollout_client.contract.rollouts import SampleResult
from rollout_client.data_out.files import read_rollouts

DEFAULT_SHOWN = 5


@command
def view(
    file: Annotated[Path, typer.Argument(help="A .jsonl or .parquet file of `rollout run` or of `save`.")],
    task: Annotated[str | None, typer.Option(help="Only rollouts of this task.")] = None,
    status: Annotated[str | None, typer.Option(help="Only rollouts with this status.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rollouts with this reward or a higher one.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only rollouts with this reward or a lower one.")] = None,
    count: Annotated[int, typer.Option(min=0, help="Number of transcripts to show; 0 only counts.")] = DEFAULT_SHOWN,
    as_json: AsJson = False,
) -> None:
    """Show transcripts of the rollouts in FILE, and count all of those that are asked for."""

    def is_asked_for(sample: SampleResult) -> bool:
        reward = sample.total_reward
        return (
            (task is None or sample.task_name == task)
            and (status is None or sample.status == status)
            and (min_reward is None or (reward is not None and reward >= min_reward))
            and (max_reward is None or (reward is not None and reward <= max_reward))
        )

    totals = Totals()
    shown: list[SampleResult] = []
    for sample in filter(is_asked_for, read_rollouts(file)):
        totals.add(sample)
        if len(shown) < count:
            shown.append(sample)
    document = {**totals.document(), "samples": [sample.model_dump(exclude_unset=True) for sample in shown]}
    show(document, as_json, *map(transcript, shown), totals_table(totals))


@command
def play(
    task: Task,
    options: RolloutOptions,
    service: Connection,
    count: Annotated[int, typer.Option(min=1, help="Samples to play.")] = 4,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Play example samples of a TASK and show what happened."""
    with service.client() as client:
        response = client.rollout(client.example_samples(task, count, seed), progress=True, **options)
    show(response, as_json, *map(transcript, response.samples), metrics_table(response.metrics))
