"""Malformed and hostile requests by the thousand against the service: `python -m tests.endurance fuzz`.

Four parts: `routes` has schemathesis make requests of the OpenAPI description of each route, all of its checks on;
`bodies` mutates right bodies; `slow` has clients that send and read a byte a second. These
three run on simulated engines; `agents` does the first two with the routes of the model server and of sessions, on a
real engine. Whatever is sent, it must hold:

- no answer is a 5xx, and none holds a traceback or a path of the server;
- a 422 names the field;
- the ingress's event loop never stands still for more than `MOST_GAP_MS` of its processor time, as a core of usual
  speed counts it (`tests/endurance/core_speed.py`);
- afterwards the service is ready and plays rollouts, on the replicas that it had.

The cases are appended to a file in portions, and what is there already is not sent again; a target that had problems
begins anew. The last line is JSON: what all portions in that file come to. The exit code is 1 if something does not
hold.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated

import httpx
import typer
from rich.console import Console

from benchmarks.tree import commit
from tests.endurance.core_speed import core_speed
from tests.endurance.fuzz import agent_bodies
from tests.endurance.fuzz.bodies import ROLLOUT, TARGETS, fuzz_bodies
from tests.endurance.fuzz.fuzzed_service import FuzzedService, fuzzed_service, simulated, with_engine
from tests.endurance.fuzz.ingress_probe import IngressProbe
from tests.endurance.fuzz.results import Portion, begins_anew, cases_of, counted, problems_of, totals
from tests.endurance.fuzz.routes import fuzz_route, operations
from tests.endurance.fuzz.slow_clients import SLOW_CLIENTS, fuzz_slowly
from tests.endurance.fuzz.tally import Tally
from tests.endurance.reporting import finish
from tests.endurance.result_lines import append, read
from tests.endurance.running import running

SIMULATED_PARTS = ("routes", "bodies", "slow")
AGENTS = "agents"
PARTS = (*SIMULATED_PARTS, AGENTS)
PORTION = 1500
"""Cases of a portion: an interrupted run loses less than one."""
PORTION_OF_AGENTS = 1000
"""A real engine answers slowly."""
MOST_PORTIONS = 4
"""Of a target in one run, as a multiple of those that it should take: schemathesis may find few cases of a small
route."""
MOST_GAP_MS = 50.0
HEALTHY_WITHIN_S = 60.0
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Target:
    """What is attacked."""

    name: str
    cases: int
    """How many it is to have, over all runs."""
    send: Callable[[range], Tally]
    """Sends the cases with these numbers: other numbers make other cases."""
    portion: int = PORTION


def targets(service: FuzzedService, parts: Sequence[str], cases: int, slow_clients: int, seed: int) -> Iterator[Target]:
    url, headers = service.url, service.headers
    if "routes" in parts:
        yield from route_targets(service, cases, seed, of_agents=False)
    if "bodies" in parts:
        for name, target in TARGETS.items():
            yield Target(name, cases, partial(fuzz_bodies, url, target, seed=seed, headers=headers))
    if "slow" in parts:
        for name, slow in SLOW_CLIENTS.items():
            yield Target(name, slow_clients, partial(fuzz_slowly, url, slow, headers=headers), portion=slow_clients)


def agent_targets(service: FuzzedService, cases: int, seed: int) -> Iterator[Target]:
    """As `targets`, of a service with a real engine."""
    yield from route_targets(service, cases, seed, of_agents=True)
    for name, target in agent_bodies.TARGETS.items():
        placed = agent_bodies.in_a_session(service.url, target, service.headers)
        send = partial(fuzz_bodies, service.url, placed, seed=seed, headers=service.headers)
        yield Target(name, cases, send, PORTION_OF_AGENTS)


def route_targets(service: FuzzedService, cases: int, seed: int, of_agents: bool) -> Iterator[Target]:
    portion = PORTION_OF_AGENTS if of_agents else PORTION
    for operation_id, name in operations(service.url, of_agents).items():
        send = partial(fuzz_route, service.url, operation_id, seed=seed, headers=service.headers)
        yield Target(name, cases, send, portion)


def fuzz(service: FuzzedService, chosen: Iterator[Target], results: Path, only: str, probe: IngressProbe) -> None:
    for target in chosen:
        if only not in target.name:
            continue
        for _ in range(MOST_PORTIONS * -(-target.cases // target.portion)):
            numbers = missing(target, counted(read(results, Portion)).get(target.name, []))
            if not numbers:
                break
            portion = attacked(service, target, numbers, probe)
            append(results, portion)
            show(portion)
            if portion.problems:
                break


def missing(target: Target, sent: Sequence[Portion]) -> range:
    """The numbers of the cases of the next portion; none if the target has had its cases."""
    first = 0 if begins_anew(sent) else cases_of(sent)
    return range(first, max(first, min(target.cases, first + target.portion)))


def attacked(service: FuzzedService, target: Target, numbers: range, probe: IngressProbe) -> Portion:
    with console.status(f"{target.name}: {len(numbers)} cases"):
        probe.restart()
        speed = core_speed()
        begun_at = monotonic()
        tally = target.send(numbers)
        seconds = monotonic() - begun_at
        gap = probe.longest_gap()
    problems = [*tally.problems, *health_problems(service)]
    gap_ms = gap.cpu_ms * speed
    if gap_ms > MOST_GAP_MS:
        problems.append(f"the ingress's event loop stood still for {gap_ms:.0f} ms")
    if gap.new_replicas:
        problems.append(f"{gap.new_replicas} ingress replicas were replaced")
    figures = round(gap_ms, 1), round(seconds, 1), commit(), round(speed, 2)
    return Portion(target.name, tally.cases, problems, *figures)


def show(portion: Portion) -> None:
    console.print(
        f"{portion.target}: {portion.cases} cases, {portion.cases / max(portion.seconds, 0.1):.0f}/s, "
        f"{len(portion.problems)} problems, gap {portion.loop_gap_ms:.1f} ms",
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
    results: Annotated[Path, typer.Option(help="The file that portions are appended to.")] = Path("fuzz.jsonl"),
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    chosen = parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are only {', '.join(PARTS)}")
    probe = IngressProbe()
    if set(chosen) & set(SIMULATED_PARTS):
        with running(console, fuzzed_service(console, simulated())) as service:
            fuzz(service, targets(service, chosen, cases, slow_clients, seed), results, only, probe)
    if AGENTS in chosen:
        with running(console, fuzzed_service(console, with_engine())) as service:
            fuzz(service, agent_targets(service, cases, seed), results, only, probe)
    by_target = counted(read(results, Portion))
    finish(console, problems_of(by_target), totals(by_target))


if __name__ == "__main__":
    typer.run(main)
