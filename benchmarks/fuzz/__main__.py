"""Malformed and hostile requests by the thousand against the service: `make fuzz`.

Four parts: `routes` has schemathesis make requests of the OpenAPI description of each route, all of its checks on;
`bodies` mutates right bodies, and answers for the client; `slow` has clients that send and read a byte a second. These
three run on simulated engines; `agents` does the first two with the routes of the model server and of sessions, on a
real engine. Whatever is sent, it must hold:

- no answer is a 5xx, and none holds a traceback or a path of the server;
- a 422 names the field;
- the ingress's event loop never stands still for more than `MOST_GAP_MS` of its processor time;
- afterwards the service is ready and plays rollouts, on the replicas that it had.

Cases count over several runs, in a file. The last line is JSON. The exit code is 1 if something does not hold.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from benchmarks.fuzz import agent_bodies
from benchmarks.fuzz.bodies import ROLLOUT, TARGETS, fuzz_bodies
from benchmarks.fuzz.client_readers import READERS, fuzz_reader
from benchmarks.fuzz.fuzzed_service import FuzzedService, fuzzed_service, simulated, with_engine
from benchmarks.fuzz.ingress_probe import IngressProbe
from benchmarks.fuzz.routes import fuzz_route, operations
from benchmarks.fuzz.slow_clients import SLOW_CLIENTS, fuzz_slowly
from benchmarks.fuzz.tally import Tallies, Tally
from benchmarks.process_group import no_process_left
from benchmarks.soak.reporting import finish
from service.local import sentences_for_the_user

RESULTS = Path("fuzz-results.json")
SIMULATED_PARTS = ("routes", "bodies", "slow")
AGENTS = "agents"
PARTS = (*SIMULATED_PARTS, AGENTS)
MOST_GAP_MS = 50.0
HEALTHY_WITHIN_S = 60.0
console = Console(stderr=True)
Fuzz = Callable[[int], Tally]
"""Sends so many cases to one target."""


def targets(
    service: FuzzedService, parts: Sequence[str], cases: int, slow_clients: int, seed: int
) -> Iterator[tuple[str, int, Fuzz]]:
    """Each target by its name, with how many cases it is to have."""
    url, headers = service.url, service.headers
    if "routes" in parts:
        yield from route_targets(service, cases, seed, of_agents=False)
    if "bodies" in parts:
        for name, target in TARGETS.items():
            yield name, cases, partial(fuzz_bodies, url, target, seed=seed, headers=headers)
        for name, reader in READERS.items():
            yield name, cases, partial(fuzz_reader, url, reader, seed=seed, headers=headers)
    if "slow" in parts:
        for name, slow in SLOW_CLIENTS.items():
            yield name, slow_clients, partial(fuzz_slowly, url, slow, headers=headers)


def agent_targets(service: FuzzedService, cases: int, seed: int) -> Iterator[tuple[str, int, Fuzz]]:
    """As `targets`, of a service with a real engine."""
    yield from route_targets(service, cases, seed, of_agents=True)
    for name, target in agent_bodies.TARGETS.items():
        placed = agent_bodies.in_a_session(service.url, target, service.headers)
        yield name, cases, partial(fuzz_bodies, service.url, placed, seed=seed, headers=service.headers)


def route_targets(service: FuzzedService, cases: int, seed: int, of_agents: bool) -> Iterator[tuple[str, int, Fuzz]]:
    for operation_id, name in operations(service.url, of_agents).items():
        yield name, cases, partial(fuzz_route, service.url, operation_id, seed=seed, headers=service.headers)


def fuzz(
    service: FuzzedService,
    chosen: Iterator[tuple[str, int, Fuzz]],
    tallies: Tallies,
    only: str,
    probe: IngressProbe,
) -> None:
    for name, cases, send in chosen:
        missing = tallies.missing(name, cases)
        if only not in name or not missing:
            continue
        with console.status(f"{name}: {missing} cases"):
            probe.restart()
            tally = send(missing)
            gap = probe.longest_gap()
        tally.loop_gap_ms = gap.cpu_ms
        if gap.cpu_ms > MOST_GAP_MS:
            tally.problems.append(f"the ingress's event loop stood still for {gap.cpu_ms:.0f} ms {gap.executed}")
        tally.problems += health_problems(service)
        tallies.add(name, tally)
        console.print(
            f"{name}: {tally.cases} cases, {len(tally.problems)} problems, gap {gap.cpu_ms:.1f} ms "
            f"({gap.wall_ms:.1f} ms of wall time)",
            highlight=False,
        )


def health_problems(service: FuzzedService) -> list[str]:
    """What is wrong with the service now that the cases have ended."""
    with httpx.Client(base_url=service.url, headers=service.headers, timeout=HEALTHY_WITHIN_S) as client:
        if (ready := client.get("/readyz")).status_code != httpx.codes.OK:
            return [f"afterwards the service is not ready: {ready.text}"]
        played = client.post("/v1/rollout", content=ROLLOUT).json()
    failed = [sample["error"] for sample in played.get("samples", [{"error": played}]) if sample.get("error")]
    return [f"afterwards rollouts fail: {failed[0]}"] if failed else []


def main(
    parts: Annotated[str, typer.Option(help=f"Of {', '.join(PARTS)}, with commas between them.")] = ",".join(PARTS),
    cases: Annotated[int, typer.Option(min=1, help="Of each route and each kind of body.")] = 3000,
    slow_clients: Annotated[int, typer.Option(min=1, help="Of each kind.")] = 1000,
    only: Annotated[str, typer.Option(help="Of the targets those whose names contain this.")] = "",
    results: Annotated[Path, typer.Option(help="The cases of earlier runs, which count.")] = RESULTS,
    stacks: Annotated[bool, typer.Option(help="Name what the event loop executed in its longest gap.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    chosen = parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are only {', '.join(PARTS)}")
    tallies = Tallies(results)
    with sentences_for_the_user(console), no_process_left():
        if set(chosen) & set(SIMULATED_PARTS):
            with fuzzed_service(console, simulated()) as service:
                fuzz(service, targets(service, chosen, cases, slow_clients, seed), tallies, only, IngressProbe(stacks))
        if AGENTS in chosen:
            with fuzzed_service(console, with_engine()) as service:
                fuzz(service, agent_targets(service, cases, seed), tallies, only, IngressProbe(stacks))
    report(tallies)


def report(tallies: Tallies) -> None:
    """Raises `typer.Exit` if something does not hold."""
    by_target = tallies.by_target
    figures = {
        "cases": {name: tally.cases for name, tally in by_target.items()},
        "loop_gap_ms": round(max((tally.loop_gap_ms for tally in by_target.values()), default=0.0), 1),
        "fewest_cases": min((tally.cases for tally in by_target.values()), default=0),
    }
    finish(console, tallies.problems(), figures)


if __name__ == "__main__":
    typer.run(main)
