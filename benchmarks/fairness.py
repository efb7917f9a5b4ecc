"""How requests share simulated engines: an evaluation and single samples behind a large training batch.

The same batch is posted to a service as it is and to one whose replicas have no window, in which every generation waits
in its engine.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from statistics import quantiles
from time import perf_counter

import aiohttp
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from benchmarks.rollout_load import play, post_sample
from benchmarks.scale_service import measured, with_timing

FLEET = 4
TIMING = {"time_to_first_token_s": 0.1, "time_per_token_s": 0.05, "max_num_seqs": 64, "length_spread": 0.5}
TRAINING_SAMPLES, TRAINING_TURNS = 8192, 4
EVALUATION_SAMPLES, EVALUATION_TURNS = 64, 8
SINGLE_SAMPLES = 200
SINGLE_SAMPLES_PER_S = 20.0
WARM_UP_SAMPLES = 64
SETTLE_S = 5.0
"""After the training batch was posted, until all replicas are full."""


@dataclass(frozen=True, slots=True)
class Fairness:
    """Seconds of an evaluation, and of the slowest of a hundred single samples."""

    evaluation_alone_on_half_s: float
    evaluation_behind_training_s: float
    evaluation_behind_over_alone: float
    single_p99_s: float
    single_p99_without_window_s: float
    single_p99_without_over_with: float


def fairness(settings: ServeDeploySchema, console: Console) -> Fairness:
    half, whole = (with_timing(settings, TIMING, replicas) for replicas in (FLEET // 2, FLEET))
    alone_s = measured(half, evaluation_alone, console)
    behind_s, with_window_s = measured(whole, partial(evaluation_and_single_samples, console=console), console)
    without_window = whole.model_copy(deep=True)
    without_window.applications[0].args["scheduling"] = {"window_factor": None}
    without_window_s = measured(without_window, partial(single_samples_behind_training, console=console), console)
    return Fairness(
        evaluation_alone_on_half_s=alone_s,
        evaluation_behind_training_s=behind_s,
        evaluation_behind_over_alone=behind_s / alone_s,
        single_p99_s=with_window_s,
        single_p99_without_window_s=without_window_s,
        single_p99_without_over_with=without_window_s / with_window_s,
    )


async def evaluation_alone(session: aiohttp.ClientSession) -> float:
    await play(session, WARM_UP_SAMPLES, turns=1)
    return (await play(session, EVALUATION_SAMPLES, EVALUATION_TURNS)).seconds


async def evaluation_and_single_samples(session: aiohttp.ClientSession, console: Console) -> tuple[float, float]:
    await play(session, WARM_UP_SAMPLES, turns=1)
    async with training(session):
        with console.status(f"An evaluation of {EVALUATION_SAMPLES} behind {TRAINING_SAMPLES}"):
            evaluation = await play(session, EVALUATION_SAMPLES, EVALUATION_TURNS)
        return evaluation.seconds, await p99_of_single_samples(session, console)


async def single_samples_behind_training(session: aiohttp.ClientSession, console: Console) -> float:
    await play(session, WARM_UP_SAMPLES, turns=1)
    async with training(session):
        return await p99_of_single_samples(session, console)


@asynccontextmanager
async def training(session: aiohttp.ClientSession) -> AsyncIterator[None]:
    """The training batch is played for the length of the block; what is left of it is cancelled at the end."""
    playing = asyncio.create_task(play(session, TRAINING_SAMPLES, TRAINING_TURNS))
    await asyncio.sleep(SETTLE_S)
    try:
        yield
        if playing.done():
            raise RuntimeError("The training batch ended before the measurement behind it.")
    finally:
        playing.cancel()
        with suppress(asyncio.CancelledError):
            await playing


async def p99_of_single_samples(session: aiohttp.ClientSession, console: Console) -> float:
    with console.status(f"{SINGLE_SAMPLES} single samples behind {TRAINING_SAMPLES}"):
        begun: list[asyncio.Task[float]] = []
        for _ in range(SINGLE_SAMPLES):
            begun.append(asyncio.create_task(seconds_of_one_sample(session)))
            await asyncio.sleep(1 / SINGLE_SAMPLES_PER_S)
        return quantiles(await asyncio.gather(*begun), n=100)[98]


async def seconds_of_one_sample(session: aiohttp.ClientSession) -> float:
    began = perf_counter()
    await post_sample(session)
    return perf_counter() - began
