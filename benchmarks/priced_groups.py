"""How many groups have a gradient where rewards decide their sizes, against groups of one size: `make bench-priced`.

Rollouts pass at random, with the pass rates of a population of samples; no engine runs. A group of one size is as large
as the others are in the mean: both cost as many rollouts. Compared are the share of groups in which some rollouts
passed and some did not, and the error of the gradient that a group gives for the pass rate's own logit, with the mean
of the other rollouts as its baseline. The last line is JSON.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import typer
from rich.console import Console
from rich.table import Table

from rollout_client.contract.group_conditions import GenerationRange
from service.rollouts.priced_groups import is_decided

POPULATIONS: dict[str, Callable[[random.Random], float]] = {
    "all rates alike": lambda draw: draw.random(),
    "mostly easy or hard": lambda draw: draw.betavariate(0.5, 0.5),
    "mostly hard": lambda draw: draw.betavariate(0.3, 1.0),
}
RANGES = {
    "4..16": GenerationRange(min=4, max=16),
    "4..32": GenerationRange(min=4, max=32),
    "4..32, width 1": GenerationRange(min=4, max=32, width=1),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one range in one population; those of groups of one size are of the same mean size."""

    rollouts: float
    """Of a group, in the mean."""
    with_gradient: float
    """Share of the groups."""
    with_gradient_of_one_size: float
    squared_error: float
    """Mean squared error of the gradient, in proportion to that of groups of one size."""


def main(samples: int = 20_000, seed: int = 0) -> None:
    table = Table("pass rates", "range", "rollouts", "with gradient", "of one size", "squared error")
    figures: dict[str, Figures] = {}
    for population, rate_of in POPULATIONS.items():
        draw = random.Random(seed)
        rates = [rate_of(draw) for _ in range(samples)]
        for name, generations in RANGES.items():
            each = figures[f"{population}, {name}"] = compared(generations, rates, draw)
            shares = (f"{each.with_gradient:.3f}", f"{each.with_gradient_of_one_size:.3f}")
            table.add_row(population, name, f"{each.rollouts:.1f}", *shares, f"{each.squared_error:.2f}")
    Console(stderr=True).print(table)
    rounded = {name: {key: round(value, 3) for key, value in asdict(each).items()} for name, each in figures.items()}
    typer.echo(json.dumps(rounded))


def compared(generations: GenerationRange, rates: Sequence[float], draw: random.Random) -> Figures:
    groups = [priced_group(generations, rate, draw) for rate in rates]
    size = fmean(map(len, groups))
    # Between two sizes, the groups of both in proportion.
    below = int(size)
    same = [group_of(below + (draw.random() < size - below), rate, draw) for rate in rates]
    errors = [fmean(map(squared_error, found, rates)) for found in (groups, same)]
    return Figures(size, fmean(map(has_gradient, groups)), fmean(map(has_gradient, same)), errors[0] / errors[1])


def priced_group(generations: GenerationRange, rate: float, draw: random.Random) -> list[float]:
    rewards = group_of(generations.min, rate, draw)
    while len(rewards) < generations.max and not is_decided(generations, rewards):
        rewards += group_of(min(generations.min, generations.max - len(rewards)), rate, draw)
    return rewards


def group_of(size: int, rate: float, draw: random.Random) -> list[float]:
    return [float(draw.random() < rate) for _ in range(size)]


def has_gradient(rewards: Sequence[float]) -> bool:
    return min(rewards) < max(rewards)


def squared_error(rewards: Sequence[float], rate: float) -> float:
    """Of the gradient of the pass rate by its logit, which is the rate times the rate of failures."""
    total, others = sum(rewards), len(rewards) - 1
    gradient = fmean((reward - (total - reward) / others) * (reward - rate) for reward in rewards)
    return (gradient - rate * (1 - rate)) ** 2


if __name__ == "__main__":
    typer.run(main)
