"""`rollout bench`: how fast a service plays rollouts, from here."""

import time
from typing import Annotated, Any

import typer
from rich.table import Table

from rollout_client.calls.options import DEFAULT_URL
from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.cli.commands.evaluate import samples_of
from rollout_client.cli.options import (
    DEFAULT_CHUNK_SIZE,
    DEFAULT_MAX_ERROR_RATE,
    DEFAULT_RETRIES,
    ApiKeyFile,
    ChunkSize,
    MaxErrorRate,
    Retries,
    TimeoutS,
    Url,
    async_client_of,
    client_of,
    plays_rollouts,
)
from rollout_client.cli.output import TOO_MANY_ERRORS, AsJson, errors_as_sentences, show
from rollout_client.cli.run.plan import with_seeds
from rollout_client.cli.run.player import Playing
from rollout_client.cli.run.totals import Totals
from rollout_client.cli.transcript import number, plain
from rollout_client.contract.rollouts import SampleResult


@plays_rollouts
def bench(
    task: Annotated[str, typer.Argument(help="A name from `rollout tasks`.")],
    options: RolloutOptions,
    count: Annotated[int, typer.Option(min=1, help="Samples to play.")] = 64,
    warm_up: Annotated[int, typer.Option(min=0, help="Samples that are played before the clock starts.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the samples.")] = 0,
    chunk_size: ChunkSize = DEFAULT_CHUNK_SIZE,
    max_error_rate: MaxErrorRate = DEFAULT_MAX_ERROR_RATE,
    url: Url = DEFAULT_URL,
    api_key_file: ApiKeyFile = None,
    timeout_s: TimeoutS = None,
    retries: Retries = DEFAULT_RETRIES,
    as_json: AsJson = False,
) -> None:
    """Play example samples of a TASK as fast as the service can, and show rollouts, turns and tokens a second."""
    totals = Totals()
    turns: list[int] = []
    ends: list[float] = []

    async def ended(_row: int, group: list[SampleResult]) -> None:
        turns.extend(sample.metrics.turn_count for sample in group)
        ends.append(time.perf_counter())

    async def ignored(_row: int, _group: list[SampleResult]) -> None:
        pass

    def playing(samples: list[dict[str, Any]]) -> Playing:
        client = async_client_of(url, api_key_file, retries, timeout_s)
        return Playing(client, with_seeds(samples, options), options, chunk_size, retries)

    with errors_as_sentences():
        with client_of(url, api_key_file, retries, timeout_s) as client:
            samples = samples_of(client, [task], None, warm_up + count, seed, None)
        if warm_up:
            playing(samples[:warm_up]).play(ignored, Totals())
        began = time.perf_counter()
        playing(samples[warm_up:]).play(ended, totals)
    taken_s = ends[-1] - began
    document = {
        **totals.document(),
        "seconds": taken_s,
        "first_group_s": ends[0] - began,
        "rollouts_per_s": totals.rollouts / taken_s,
        "turns_per_s": sum(turns) / taken_s,
        "tokens_per_s": totals.tokens / taken_s,
    }
    show(document, as_json, bench_table(document))
    if totals.error_rate > max_error_rate:
        raise typer.Exit(TOO_MANY_ERRORS)


def bench_table(document: dict[str, Any]) -> Table:
    table = Table(title="Bench", title_justify="left")
    table.add_column("name")
    table.add_column("value", justify="right")
    for name, value in document.items():
        if isinstance(value, int | float):
            table.add_row(plain(name), number(value))
    return table
