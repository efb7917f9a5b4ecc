"""Ten times the load that is admitted, for a minute; a part of `make bench-scale`.

Every client posts one request after the other and comes back when it is refused; half of them as `Retry-After` says,
the other half after a second. The service must refuse at once, finish all that it has admitted, and hold no more memory
at the end than at the beginning. The last line is JSON; a request that is lost ends the benchmark with an error.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Annotated

import aiohttp
import typer
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from benchmarks.process_group import no_process_left
from benchmarks.resident_memory import replica, resident_kb
from benchmarks.rollout_load import HTTP_OK, JSON, WrongAnswer, rollout_body
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service, sentences_for_the_user

ROLLOUTS = 256
"""That may be in flight."""
ROLLOUTS_A_REQUEST = 8
MOST_TURNS = 6
"""Clients ask for different lengths, so that not all requests end at one instant."""
OVERLOAD = 10
CLIENTS = OVERLOAD * ROLLOUTS // ROLLOUTS_A_REQUEST
IMPATIENT_S = 1.0
SAMPLE_S = 1.0
SETTLING_SHARE = 0.3
"""Of the time, in which memory may still grow: for connections, and until the allocator has its arenas."""
HTTP_TOO_MANY_REQUESTS = 429
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Overload:
    """What became of the requests. Times are from posting to the whole answer, at the client."""

    overload_finished: int
    overload_refused: int
    overload_lost: int
    """Neither finished nor refused."""
    overload_refused_p50_ms: float
    overload_refused_p99_ms: float
    overload_refused_max_ms: float
    overload_in_flight_share: float
    """Rollouts that were in flight on average, of those that were admitted at most."""
    overload_memory_growth_mb: float
    """Of the ingress, from the end of the settling to the end."""


@dataclass(slots=True)
class Tally:
    finished_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def with_bound(settings: ServeDeploySchema) -> ServeDeploySchema:
    """A copy of the config that admits `ROLLOUTS` rollouts."""
    changed = settings.model_copy(deep=True)
    [application] = changed.applications
    application.args["admission"] = {"max_rollouts": ROLLOUTS}
    return changed


async def overload(session: aiohttp.ClientSession, seconds: float = 60.0) -> Overload:
    """Raises `WrongAnswer` if a request was lost."""
    ingress = replica("Ingress")
    tally, until = Tally(), perf_counter() + seconds
    clients = [asyncio.create_task(post_again(session, tally, until, number)) for number in range(CLIENTS)]
    held_kb: list[float] = []
    with console.status(f"{CLIENTS} clients post {ROLLOUTS_A_REQUEST} rollouts each; {ROLLOUTS} are admitted"):
        while perf_counter() < until:
            await asyncio.sleep(SAMPLE_S)
            held_kb.append(resident_kb(ingress))
        await asyncio.gather(*clients)
    if tally.lost:
        raise WrongAnswer(f"{len(tally.lost)} requests were lost, the first by: {tally.lost[0]}")
    percentiles = quantiles(tally.refused_s, n=100)
    return Overload(
        overload_finished=len(tally.finished_s),
        overload_refused=len(tally.refused_s),
        overload_lost=len(tally.lost),
        overload_refused_p50_ms=1000 * percentiles[49],
        overload_refused_p99_ms=1000 * percentiles[98],
        overload_refused_max_ms=1000 * max(tally.refused_s),
        overload_in_flight_share=sum(tally.finished_s) * ROLLOUTS_A_REQUEST / seconds / ROLLOUTS,
        overload_memory_growth_mb=growth_kb(held_kb) / 1024,
    )


async def post_again(session: aiohttp.ClientSession, tally: Tally, until: float, number: int) -> None:
    """One client: posts one request after the other until the time is over; the last one is waited for."""
    is_patient, turns = number % 2 == 0, 1 + number // 2 % MOST_TURNS
    body = rollout_body(ROLLOUTS_A_REQUEST, turns)
    # Not all of them at the first instant.
    await asyncio.sleep(random.uniform(0, IMPATIENT_S))
    while (began := perf_counter()) < until:
        try:
            async with session.post("/rollout", data=body, headers=JSON) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            tally.lost.append(f"{type(error).__name__}: {error}")
            continue
        took_s = perf_counter() - began
        if response.status == HTTP_OK and answer.count(b'"status":"max_turns"') == ROLLOUTS_A_REQUEST:
            tally.finished_s.append(took_s)
        elif response.status == HTTP_TOO_MANY_REQUESTS:
            tally.refused_s.append(took_s)
            await asyncio.sleep(int(response.headers["Retry-After"]) if is_patient else IMPATIENT_S)
        else:
            tally.lost.append(f"{response.status}: {answer[:1000].decode()}")


def growth_kb(held_kb: Sequence[float]) -> float:
    """From the first half to the second half of what was measured after the settling."""
    settled = held_kb[int(len(held_kb) * SETTLING_SHARE) :]
    half = len(settled) // 2
    return median(settled[half:]) - median(settled[:half])


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.scale.yaml"),
    seconds: Annotated[float, typer.Option(min=10)] = 60.0,
) -> None:
    settings = with_bound(read_config(config, port=free_port()))

    async def measure(url: str) -> Overload:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(None)
        async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
            return await overload(session, seconds)

    with sentences_for_the_user(console), no_process_left(), local_service(settings, console) as url:
        figures = {name: round(value, 3) for name, value in asdict(asyncio.run(measure(url))).items()}
    typer.echo(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
