"""`rollout bench`: how fast a service plays rollouts, from here."""

import time
from typing import Annotated

import typer

from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.cli.options import (
    DEFAULT_CHUNK_SIZE,
    DEFAULT_MAX_ERROR_RATE,
    ChunkSize,
    Connection,
    MaxErrorRate,
    Seed,
    Task,
    command,
)
from rollout_client.cli.output import AsJson, check_error_rate, number, show, value_table
from rollout_client.cli.run.inputs import samples_of
from rollout_client.cli.run.player import RunPlayer, play_groups
from rollout_client.cli.run.totals import Totals
from rollout_client.contract.rollouts import SampleResult


@command
def bench(
    task: Task,
    options: RolloutOptions,
    service: Connection,
    count: Annotated[int, typer.Option(min=1, help="Samples to play.")] = 64,
    warm_up: Annotated[int, typer.Option(min=0, help="Samples that are played before the clock starts.")] = 1,
    seed: Seed = 0,
    chunk_size: ChunkSize = DEFAULT_CHUNK_SIZE,
    max_error_rate: MaxErrorRate = DEFAULT_MAX_ERROR_RATE,
    as_json: AsJson = False,
) -> None:
    """Play example samples of a TASK as fast as the service can, and show rollouts, turns and tokens a second."""
    totals = Totals()
    turns: list[int] = []
    ends: list[float] = []

    async def count_turns(_row: int, group: list[SampleResult]) -> None:
        turns.extend(sample.metrics.turn_count for sample in group)
        ends.append(time.perf_counter())

    with service.client() as client:
        samples = samples_of(client, [task], None, warm_up + count, seed, None)
    if warm_up:
        play_groups(RunPlayer(service, samples[:warm_up], options, chunk_size))
    began = time.perf_counter()
    RunPlayer(service, samples[warm_up:], options, chunk_size).play(count_turns, totals)
    taken_s = ends[-1] - began
    document = {
        **totals.document(),
        "seconds": taken_s,
        "first_group_s": ends[0] - began,
        "rollouts_per_s": totals.rollouts / taken_s,
        "turns_per_s": sum(turns) / taken_s,
        "tokens_per_s": totals.tokens / taken_s,
    }
    figures = [(name, number(value)) for name, value in document.items() if isinstance(value, int | float)]
    show(document, as_json, value_table("Bench", figures))
    check_error_rate(totals.error_rate, max_error_rate)
