"""What an `Idempotency-Key` costs: `make bench-journal`.

The same request, of many samples on simulated engines (`serve_config.scale.yaml`), is played by turns without a key and
with one, whose finished turns and groups are journalled. The load and the job store share the cores with the service.
The last line is JSON.
"""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated
from uuid import uuid4

import aiohttp
import typer
from rich.console import Console

from benchmarks.process_group import no_process_left
from benchmarks.rollout_load import play
from benchmarks.scale_service import measured
from service.startup.config import read_config
from service.startup.local_service import sentences_for_the_user

WARM_UP_SAMPLES = 64
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class JournalCost:
    """Medians over the rounds."""

    turns_per_s: float
    turns_per_s_with_key: float
    with_key_over_without: float
    """Of the two rates in one round: the machine's other load is much the same in both."""


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.scale.yaml"),
    samples: Annotated[int, typer.Option(min=1, help="In flight at once.")] = 1024,
    turns: Annotated[int, typer.Option(min=1)] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Each plays once without a key and once with one.")] = 7,
) -> None:
    with sentences_for_the_user(console), no_process_left():
        measure = partial(journal_cost, samples=samples, turns=turns, rounds=rounds)
        typer.echo(json.dumps(asdict(measured(read_config(config), measure, console))))


async def journal_cost(session: aiohttp.ClientSession, samples: int, turns: int, rounds: int) -> JournalCost:
    for key in (None, uuid4().hex):
        await play(session, WARM_UP_SAMPLES, turns, key)
    plain, keyed = list[float](), list[float]()
    for number in range(rounds):
        for rates, key in ((plain, None), (keyed, uuid4().hex)):
            played = await play(session, samples, turns, key)
            rates.append(samples * turns / played.seconds)
        console.print(f"round {number + 1} of {rounds}: {plain[-1]:,.0f} turns a second, {keyed[-1]:,.0f} with a key")
    ratios = [with_key / without for without, with_key in zip(plain, keyed, strict=True)]
    return JournalCost(round(median(plain)), round(median(keyed)), round(median(ratios), 3))


if __name__ == "__main__":
    typer.run(main)
