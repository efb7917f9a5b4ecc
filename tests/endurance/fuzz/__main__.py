"""Malformed and hostile requests by the thousand against the service: `python -m tests.endurance fuzz`.

Four parts: `routes` has schemathesis make requests of the OpenAPI description of each route, all of its checks on;
`bodies` mutates right bodies; `slow` has clients that send and read a byte a second. These three run on simulated
engines; `agents` does the first with the routes of the model server and of sessions, on a real engine. Whatever is
sent, it must hold:

- no answer is a 5xx, and none holds a traceback or a path of the server;
- a 422 names the field;
- the ingress's event loop never stands still for more than `MOST_GAP_MS` of its processor time, as a core of usual
  speed counts it (`tests/endurance/core_speed.py`);
- afterwards the service is ready and plays rollouts, on the replicas that it had.

The result of each target is appended to a file. A target whose last result there has no problem is not attacked again.
The last line is JSON: what the last results in that file come to. The exit code is 1 if something does not hold.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated

import httpx
import typer

from tests.endurance.core_speed import core_speed
from tests.endurance.fuzz import ingress_probe
from tests.endurance.fuzz.bodies import ROLLOUT, TARGETS, fuzz_bodies
from tests.endurance.fuzz.fuzzed_service import FuzzedService, fuzzed_service
from tests.endurance.fuzz.routes import fuzz_route, operations
from tests.endurance.fuzz.slow_clients import SLOW_CLIENTS, fuzz_slowly
from tests.endurance.program import append, console, ended_services, finish, listed, read

AGENTS = "agents"
PARTS = ("routes", "bodies", "slow", AGENTS)
MOST_GAP_MS = 50.0
MOST_PROBLEMS = 20
"""Of one target that are kept."""
HEALTHY_WITHIN_S = 60.0
Send = Callable[[FuzzedService], tuple[int, list[str]]]
"""Sends the cases of a target; returns how many there were, and what was wrong with the answers."""


@dataclass(frozen=True, slots=True)
class Attack:
    """What came of one target: a route, or one kind of body or client."""

    target: str
    cases: int
    problems: list[str]
    loop_gap_ms: float
    """The longest gap of the ingress's event loop, in its processor time, on a core of usual speed."""


def targets(url: str, parts: Set[str], cases: int) -> dict[str, Send]:
    """Those of parts that run on one service."""
    found: dict[str, Send] = {}
    if parts & {"routes", AGENTS}:
        found |= {name: partial(fuzz_route, each, cases) for each, name in operations(url, AGENTS in parts).items()}
    if "bodies" in parts:
        found |= {name: partial(fuzz_bodies, target, cases) for name, target in TARGETS.items()}
    if "slow" in parts:
        found |= {name: partial(fuzz_slowly, slow) for name, slow in SLOW_CLIENTS.items()}
    return found


def last_attacks(results: Path) -> dict[str, Attack]:
    return {attack.target: attack for attack in read(results, Attack)}


def fuzz(service: FuzzedService, sends: Mapping[str, Send], only: str, results: Path) -> None:
    done = {name for name, attack in last_attacks(results).items() if not attack.problems}
    for name, send in sends.items():
        if only in name and name not in done:
            append(results, attacked(service, name, send))


def attacked(service: FuzzedService, name: str, send: Send) -> Attack:
    with console.status(name):
        ingress_probe.restart()
        speed, begun_at = core_speed(), monotonic()
        cases, problems = send(service)
        seconds = monotonic() - begun_at
        cpu_ms, new_replicas = ingress_probe.longest_gap()
    gap_ms = round(cpu_ms * speed, 1)
    problems += health_problems(service)
    if gap_ms > MOST_GAP_MS:
        problems.append(f"the ingress's event loop stood still for {gap_ms:.0f} ms")
    if new_replicas:
        problems.append(f"{new_replicas} ingress replicas were replaced")
    console.print(f"{name}: {cases} cases, {cases / seconds:.0f}/s, {len(problems)} problems, gap {gap_ms} ms")
    return Attack(name, cases, list(dict.fromkeys(problems))[-MOST_PROBLEMS:], gap_ms)


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
    only: Annotated[str, typer.Option(help="Of the targets those whose names contain this.")] = "",
    results: Annotated[Path, typer.Option(help="The file that results are appended to.")] = Path("fuzz.jsonl"),
) -> None:
    named = set(listed(parts, PARTS))
    for on_it in (named - {AGENTS}, named & {AGENTS}):
        if on_it:
            with ended_services(), fuzzed_service(AGENTS in on_it) as service:
                fuzz(service, targets(service.url, on_it, cases), only, results)
    last = last_attacks(results)
    finish(
        [f"{name}: {problem}" for name, attack in last.items() for problem in attack.problems],
        {
            "all_cases": sum(attack.cases for attack in last.values()),
            "loop_gap_ms": max((attack.loop_gap_ms for attack in last.values()), default=0.0),
        },
    )


if __name__ == "__main__":
    typer.run(main)
