"""`rollout run`: plays a file of samples, can be killed at any time and goes on where it was."""

from pathlib import Path
from typing import Annotated

import typer

from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.cli.options import (
    DEFAULT_CHUNK_SIZE,
    DEFAULT_MAX_ERROR_RATE,
    ChunkSize,
    Connection,
    MaxErrorRate,
    Overwrite,
    command,
)
from rollout_client.cli.output import AsJson, check_error_rate, show
from rollout_client.cli.run.inputs import read_samples
from rollout_client.cli.run.player import RunPlayer, play_to_file
from rollout_client.cli.transcript import totals_table


@command
def run(
    source: Annotated[str, typer.Argument(metavar="SAMPLES", help="JSON lines, .parquet, hf:NAME, or a folder.")],
    output: Annotated[Path, typer.Option(help="Where each group is appended when it has ended, a rollout a line.")],
    options: RolloutOptions,
    service: Connection,
    columns: Annotated[list[str] | None, typer.Option("--map", help="FIELD=COLUMN; repeatable.")] = None,
    task: Annotated[str | None, typer.Option(help="The task of samples that name none.")] = None,
    split: Annotated[str, typer.Option(help="Of a data set.")] = "train",
    overwrite: Overwrite = False,
    chunk_size: ChunkSize = DEFAULT_CHUNK_SIZE,
    max_error_rate: MaxErrorRate = DEFAULT_MAX_ERROR_RATE,
    as_json: AsJson = False,
) -> None:
    """Play SAMPLES and append the results; run again after a kill or a failure, it goes on.

    Each sample is in the results exactly once, with `input_row`, its row in the input. The exit code is 3 if more than
    `--max-error-rate` of the rollouts failed, and 1 if the run could not go on.
    """
    samples = read_samples(source, columns or (), task, split)
    totals = play_to_file(RunPlayer(service, samples, options, chunk_size), output, overwrite)
    show({**totals.document(), "output": str(output)}, as_json, totals_table(totals))
    check_error_rate(totals.error_rate, max_error_rate)
