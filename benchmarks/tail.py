"""How much an evaluation that fills gaps delays training steps with stragglers: `make bench-tail`.

A training step is played by simulated engines. Its generations have lengths of a long tail, so that few places are
taken in most of its time. It is played alone and beside an evaluation of the priority `batch`, which runs before it
begins too, and so fills the engines when it comes: in pairs of the same prompts, in either order. The last line is
JSON; the exit code is 1 if the median of the pairs is delayed by more than `MOST_DELAY`, or if a request does not come
back whole.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import NormalDist, median
from time import perf_counter
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console

from benchmarks.process_group import no_process_left
from benchmarks.reporting import finish, rounds_shown
from benchmarks.rollout_load import LONGEST_LINE_BYTES, NDJSON, TASK_NAME, WrongAnswer
from benchmarks.scale_service import measured, with_timing
from service.startup.config import read_config
from service.startup.local_service import sentences_for_the_user

REPLICAS, SEQUENCES = 2, 64
TIME_PER_TOKEN_S = 0.02
TIMING = {"time_to_first_token_s": 0.05, "time_per_token_s": TIME_PER_TOKEN_S, "max_num_seqs": SEQUENCES}
MEDIAN_TOKENS, SIGMA = 48, 0.9
"""Of the lengths of a step, which are those of a log-normal distribution."""
LENGTHS, ROLLOUTS_OF_A_LENGTH = 32, 8
EVALUATION_SAMPLES, EVALUATION_TOKENS = 8192, 32
SMALL_EVALUATION_SAMPLES = 64
SETTLE_S = 1.5
"""From the start of an evaluation to that of a step."""
MOST_DELAY = 0.02
console = Console(stderr=True)


def lengths() -> list[int]:
    """The tokens of the generations of a step, each for `ROLLOUTS_OF_A_LENGTH` rollouts."""
    normal = NormalDist()
    return [
        round(MEDIAN_TOKENS * math.exp(SIGMA * normal.inv_cdf((place + 0.5) / LENGTHS))) for place in range(LENGTHS)
    ]


TOKENS_OF_A_STEP = sum(lengths()) * ROLLOUTS_OF_A_LENGTH


@dataclass(slots=True)
class Evaluation:
    """Rollouts of the evaluation that have ended."""

    tokens_at: list[tuple[float, int]] = field(default_factory=list)
    summary: dict[str, Any] | None = None

    def tokens_between(self, began: float, ended: float) -> int:
        return sum(tokens for at, tokens in self.tokens_at if began <= at < ended)


@dataclass(slots=True)
class Pairs:
    """Seconds of the steps, and which part of the idle places the evaluation used beside them."""

    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    idle_part_used: list[float] = field(default_factory=list)

    @property
    def delay(self) -> float:
        ratios = [beside / alone for alone, beside in zip(self.alone_s, self.beside_s, strict=True)]
        return median(ratios) - 1


async def play(
    session: aiohttp.ClientSession, name: str, samples: int, tokens: int, priority: str, ended: Evaluation
) -> None:
    """Plays rollouts of one turn. Raises `WrongAnswer` if one does not come back whole."""
    body = {
        "samples": [
            {"task_name": TASK_NAME, "messages": [{"role": "user", "content": f"{name} {number}"}]}
            for number in range(samples)
        ],
        "sampling": {"max_new_tokens": tokens},
        "max_rollout_turns": 1,
        "observation_format": "raw",
        "priority": priority,
    }
    async with session.post("/rollout", json=body, headers=NDJSON, read_bufsize=LONGEST_LINE_BYTES) as response:
        async for line in response.content:
            event = json.loads(line)
            if (result := event.get("sample")) is not None:
                generated = result["metrics"]["assistant_tokens"]
                if (result["status"], generated) != ("max_turns", tokens):
                    raise WrongAnswer(f"{tokens} tokens were to come: {line[:1000].decode()}")
                ended.tokens_at.append((perf_counter(), generated))
            ended.summary = event.get("summary", ended.summary)
    if ended.summary is None:
        raise WrongAnswer(f"{response.status}: the answer has no summary")


async def step(session: aiohttp.ClientSession, name: str) -> tuple[float, float]:
    """Plays one training step; returns when it began and ended."""
    began = perf_counter()
    async with asyncio.TaskGroup() as group:
        for place, tokens in enumerate(lengths()):
            group.create_task(play(session, f"{name} {place}", ROLLOUTS_OF_A_LENGTH, tokens, "train", Evaluation()))
    return began, perf_counter()


@asynccontextmanager
async def evaluation(session: aiohttp.ClientSession, name: str) -> AsyncIterator[Evaluation]:
    """An evaluation runs for the length of the block; what is left of it is cancelled at the end."""
    ended = Evaluation()
    playing = asyncio.create_task(play(session, name, EVALUATION_SAMPLES, EVALUATION_TOKENS, "batch", ended))
    await asyncio.sleep(SETTLE_S)
    try:
        yield ended
        if playing.done():
            playing.result()
            raise WrongAnswer("The evaluation ended before the step beside it.")
    finally:
        playing.cancel()
        with suppress(asyncio.CancelledError):
            await playing


async def pairs(session: aiohttp.ClientSession, repeats: int) -> tuple[Pairs, dict[str, Any]]:
    found = Pairs()
    await step(session, "warm up")
    with rounds_shown(console, repeats) as shown:
        for number in range(repeats):
            for is_shared in (False, True) if number % 2 else (True, False):
                await asyncio.sleep(SETTLE_S)
                if not is_shared:
                    began, ended = await step(session, f"{number}")
                    found.alone_s.append(ended - began)
                    continue
                async with evaluation(session, f"evaluation {number}") as beside:
                    began, ended = await step(session, f"{number}")
                found.beside_s.append(ended - began)
                idle = (ended - began) * REPLICAS * SEQUENCES / TIME_PER_TOKEN_S - TOKENS_OF_A_STEP
                found.idle_part_used.append(beside.tokens_between(began, ended) / idle)
            shown(f"delayed by {found.delay:+.1%}")
    small = Evaluation()
    async with asyncio.TaskGroup() as group:
        beside_it = group.create_task(step(session, "last"))
        await asyncio.sleep(SETTLE_S)
        await play(session, "small evaluation", SMALL_EVALUATION_SAMPLES, EVALUATION_TOKENS, "batch", small)
        await beside_it
    assert small.summary is not None
    return found, small.summary["metrics"]


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.scale.yaml"),
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of steps.")] = 9,
) -> None:
    settings = with_timing(read_config(config), TIMING, REPLICAS)
    with sentences_for_the_user(console), no_process_left():
        found, metrics = measured(settings, partial(pairs, repeats=repeats), console)
    figures = {
        "repeats": repeats,
        "alone_s": round(median(found.alone_s), 3),
        "beside_s": round(median(found.beside_s), 3),
        "delay": round(found.delay, 4),
        "delays": [round(beside / alone - 1, 4) for alone, beside in zip(found.alone_s, found.beside_s, strict=True)],
        "idle_part_used": round(median(found.idle_part_used), 3),
        "gap_tokens": metrics.get("gap_tokens", 0),
    }
    problems = []
    if found.delay > MOST_DELAY:
        problems.append(
            f"The evaluation delays training by {found.delay:.1%}, and at most {MOST_DELAY:.0%} is allowed."
        )
    if figures["gap_tokens"] != SMALL_EVALUATION_SAMPLES * EVALUATION_TOKENS:
        problems.append(f"The summary of an evaluation says {figures['gap_tokens']} tokens in gaps.")
    finish(console, problems, figures)


if __name__ == "__main__":
    typer.run(main)
