"""How many steps the built-in tasks take in a second, each in its environment alone: `make bench-tasks`.

No service is started: an environment steps its own samples as its replica does, from `extra_env_info` as JSON to a
validated outcome. `math` judges batches of 64 responses, each to a problem of its own, with a worker process for each
core; `sliding_puzzle` makes one move in each of 1,024 games of 3 x 3 tiles. The last line is JSON, with the bounds that
must hold on two cores.
"""

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from deployments.tasks.math import MathEnvironment
from deployments.tasks.sliding_puzzle import SlidingPuzzleEnvironment, game_sample
from rollout_env import ChatMessage, StepOutcome, TaskEnvironment
from rollout_env.steps import validated_step

BATCH = 64
GAMES = 1024
SHUFFLE_MOVES = 30
console = Console(stderr=True)


class Bound(NamedTuple):
    """What must hold on two cores."""

    value: float
    is_lower: bool
    unit: str


class Measured(NamedTuple):
    value: float
    bound: Bound

    @property
    def holds(self) -> bool:
        return self.value >= self.bound.value if self.bound.is_lower else self.value <= self.bound.value


def math_problem(draw: random.Random) -> tuple[str, str]:
    """A ground truth, and a long response with an equal answer that is written in another way."""
    numerator, denominator = draw.randint(1, 99), draw.randint(2, 99)
    wrong = draw.random() < 0.5
    answer = f"\\frac{{{2 * numerator + wrong}}}{{{2 * denominator}}}"
    reasoning = " ".join(f"Step {number}: $x_{number} = {draw.randint(1, 999)}$." for number in range(50))
    return f"\\frac{{{numerator}}}{{{denominator}}}", f"{reasoning} So the answer is $\\boxed{{{answer}}}$."


async def verifications_per_s(repeats: int) -> Measured:
    environment = MathEnvironment(workers=os.cpu_count() or 1)
    draw = random.Random(0)
    batches = [[math_problem(draw) for _ in range(BATCH)] for _ in range(repeats + 1)]
    slots = asyncio.Semaphore(environment.max_concurrent_steps or BATCH)

    async def step(ground_truth: str, response: str) -> StepOutcome:
        async with slots:
            return await stepped(environment, response, {"ground_truth": ground_truth})

    async def judged(batch: list[tuple[str, str]]) -> None:
        await asyncio.gather(*(step(*problem) for problem in batch))

    try:
        seconds = await seconds_of(judged, batches)
    finally:
        environment.close()
    return Measured(BATCH / statistics.median(seconds), Bound(300, True, "verifications/s"))


async def milliseconds_of_games(repeats: int) -> Measured:
    environment = SlidingPuzzleEnvironment()
    games = [await begun(environment, game_sample(3, seed, SHUFFLE_MOVES)["extra_env_info"]) for seed in range(GAMES)]

    async def moved(states: list[dict[str, Any]]) -> None:
        await asyncio.gather(*(stepped(environment, "<action>left</action>", state) for state in states))

    seconds = await seconds_of(moved, [games] * (repeats + 1))
    return Measured(1000 * statistics.median(seconds), Bound(50, False, f"ms for {GAMES} games"))


async def begun(environment: SlidingPuzzleEnvironment, extra_env_info: dict[str, Any]) -> dict[str, Any]:
    """The state of a game that has begun: most steps get one."""
    outcome = await stepped(environment, "<action>view</action>", extra_env_info)
    return outcome.metadata or {}


async def stepped(environment: TaskEnvironment, response: str, extra_env_info: dict[str, Any]) -> StepOutcome:
    log: list[ChatMessage] = [{"role": "user", "content": ""}, {"role": "assistant", "content": response}]
    return await validated_step(environment, log, extra_env_info)


async def seconds_of(work: Callable[[Any], Awaitable[None]], batches: list[Any]) -> list[float]:
    """How long each batch takes; the first one warms up."""
    await work(batches[0])
    seconds = []
    for batch in batches[1:]:
        started = time.perf_counter()
        await work(batch)
        seconds.append(time.perf_counter() - started)
    return seconds


MEASUREMENTS: dict[str, Callable[[int], Awaitable[Measured]]] = {
    "math": verifications_per_s,
    "sliding_puzzle": milliseconds_of_games,
}


async def measured_tasks(names: list[str], repeats: int) -> dict[str, Measured]:
    return {name: await MEASUREMENTS[name](repeats) for name in names}


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Batches of each task; the median counts.")] = 11,
    task: Annotated[list[str] | None, typer.Option(help="By default all.")] = None,
) -> None:
    found = asyncio.run(measured_tasks(task or list(MEASUREMENTS), repeats))
    table = Table("task", "measured", "must be", "")
    for name, measured in found.items():
        bound = f"{'at least' if measured.bound.is_lower else 'at most'} {measured.bound.value:g}"
        table.add_row(name, f"{measured.value:.1f} {measured.bound.unit}", bound, "" if measured.holds else "no")
    console.print(table)
    document = {name: {"value": round(m.value, 2), "unit": m.bound.unit, "holds": m.holds} for name, m in found.items()}
    typer.echo(json.dumps({"tasks": document, "cores": os.cpu_count()}))


if __name__ == "__main__":
    typer.run(main)
