"""What the orchestration carries without an engine behind it: `python -m benchmarks scale`.

Generators are simulated (`serve_config.scale.yaml`) and the environment costs nothing, so that only the ingress, the
calls between replicas and the proxy work; the load runs on the same cores and counts against them. Each measurement
has a service of its own: many samples in flight at once; small requests from many clients, on generators that answer
at once; and how requests share the engines (`fairness.py`). Last comes the longest gap of the event loop under hostile
requests (`loop_gap.py`). The last line is JSON.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import loop_gap
from benchmarks.fairness import fairness
from benchmarks.process_group import no_process_left
from benchmarks.resident_memory import Peak, replica, resident_kb
from benchmarks.rollout_load import Played, play, post_small_requests
from benchmarks.scale_service import measured, with_timing
from service.startup.config import read_config
from service.startup.local_service import sentences_for_the_user

BYTES_PER_ID = 8
BYTES_PER_LOGPROB = 4
"""Of a log in memory: an id in its message and in the whole conversation, and a log-probability."""
WARM_UP_SAMPLES = 64
WARM_UP_S = 2.0
SETTLE_S = 1.0
SETTLING_ROUNDS = 6
ANSWERS_AT_ONCE = {"time_to_first_token_s": 0.0, "time_per_token_s": 0.0}
BOUNDS = {
    "turns_per_s": ">= 1500",
    "kb_per_sample_in_flight": "<= 50",
    "growth_kb_per_round": "about 0",
    "requests_per_s": ">= 400",
    "p99_ms": "<= 400",
    "evaluation_behind_over_alone": "<= 1.3",
    "single_p99_without_over_with": ">= 10",
    "loop_gap_cpu_ms": "<= 50",
}
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class InFlight:
    turns_per_s: float
    """Median over the rounds."""
    kb_per_sample_in_flight: float
    """What the ingress held at most in the first round, when all of it was new, less the tokens' own."""
    growth_kb_per_round: float
    """Of what the ingress holds between the rounds, after those that the allocator takes to settle."""


@dataclass(frozen=True, slots=True)
class SmallRequests:
    requests_per_s: float
    p50_ms: float
    p99_ms: float


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.scale.yaml"),
    samples: Annotated[int, typer.Option(min=1, help="In flight at once.")] = 4096,
    turns: Annotated[int, typer.Option(min=1)] = 8,
    rounds: Annotated[int, typer.Option(min=SETTLING_ROUNDS + 2)] = SETTLING_ROUNDS + 10,
    clients: Annotated[int, typer.Option(min=1, help="Of small requests.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, help="Of small requests.")] = 20.0,
    output: Annotated[Path, typer.Option(help="The figures, as JSON.")] = Path("bench_scale.json"),
) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with sentences_for_the_user(console), no_process_left():
        settings = read_config(config)
        play_many = partial(many_in_flight, samples=samples, turns=turns, rounds=rounds)
        post_small = partial(small_requests, clients=clients, seconds=seconds)
        parts: Mapping[str, Callable[[], Mapping[str, float]]] = {
            f"{samples} samples in flight": lambda: asdict(measured(settings, play_many, console)),
            f"small requests of {clients} clients": lambda: asdict(
                measured(with_timing(settings, ANSWERS_AT_ONCE), post_small, console)
            ),
            "fairness": lambda: asdict(fairness(settings, console)),
            "the longest gap of the event loop": lambda: loop_gap.figures(loop_gap.measure_all(loop_gap.CASES)),
        }
        figures: dict[str, float] = {}
        for number, (title, measure) in enumerate(parts.items(), 1):
            console.rule(f"{number} of {len(parts)}: {title}")
            of_part = {name: round(value, 3) for name, value in measure().items()}
            console.print(", ".join(f"{name} {value:,.2f}" for name, value in of_part.items()))
            figures |= of_part
    report(figures)
    output.write_text(json.dumps(figures) + "\n")
    typer.echo(json.dumps(figures))


async def many_in_flight(session: aiohttp.ClientSession, samples: int, turns: int, rounds: int) -> InFlight:
    ingress = replica("Ingress")
    await play(session, WARM_UP_SAMPLES, turns)
    before_kb = resident_kb(ingress)
    rates, between_kb = list[float](), list[float]()
    async with Peak(ingress) as first_round:
        played = await play(session, samples, turns)
    for number in range(rounds):
        if number > 0:
            played = await play(session, samples, turns)
        rates.append(samples * turns / played.seconds)
        console.print(f"round {number + 1} of {rounds}: {rates[-1]:,.0f} turns a second")
        await asyncio.sleep(SETTLE_S)
        between_kb.append(resident_kb(ingress))
    return InFlight(
        turns_per_s=median(rates),
        kb_per_sample_in_flight=(first_round.kb - before_kb) / samples - kb_of_tokens(played),
        growth_kb_per_round=growth(between_kb[SETTLING_ROUNDS:]),
    )


def growth(held_kb: Sequence[float]) -> float:
    """A round, from the middle of the first half of the rounds to that of the second.

    What calls leave for the garbage collector comes and goes over several rounds: some megabytes either way.
    """
    half = len(held_kb) // 2
    return (median(held_kb[half:]) - median(held_kb[:half])) / half


def kb_of_tokens(played: Played) -> float:
    """Of one sample, at its end and without its prompt."""
    generated, observed = (played.metrics[f"mean_{kind}_tokens_per_sample"] for kind in ("gen", "env"))
    return float(generated * (BYTES_PER_ID + BYTES_PER_LOGPROB) + observed * BYTES_PER_ID) / 1024


async def small_requests(session: aiohttp.ClientSession, clients: int, seconds: float) -> SmallRequests:
    await post_small_requests(session, clients, WARM_UP_S)
    with console.status(f"{clients} clients post small requests for {seconds:g} s"):
        took = await post_small_requests(session, clients, seconds)
    percentiles = quantiles(took, n=100)
    return SmallRequests(
        requests_per_s=len(took) / seconds, p50_ms=1000 * percentiles[49], p99_ms=1000 * percentiles[98]
    )


def report(figures: Mapping[str, float]) -> None:
    table = Table("", "measured", "bound", title="The scale model, on this machine's cores, load included")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}", BOUNDS.get(name, ""))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
