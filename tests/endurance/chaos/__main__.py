"""Strikes the parts of a service at random moments of 256 games, again and again: `python -m tests.endurance chaos`.

The games have several turns each, are played greedily, and their right results are known from an undisturbed run. Their
requests have an `Idempotency-Key`, with which they are posted again when a stream breaks. In each round one part of a
running service gets SIGKILL: a generator replica, an engine's core or one of its workers, an environment replica, an
ingress replica, the policy store, the job store, Serve's controller. In rounds of the kinds `...-stopped` it
gets SIGSTOP in place of that, and hangs; in those of the kinds `...-drained` its deployment is scaled down to one
replica, and up again. In those of the kinds `node` and `head` the service runs on three Ray nodes of this machine, and
all processes of one get SIGKILL. It must hold in each round:

- every rollout comes back, and none twice;
- each is what it was in the undisturbed run, token by token;
- of each rollout at most one turn is done twice;
- what was struck is replaced.

The rounds are appended to a file, and what is there already is not played again. The last line is JSON: what all
rounds in that file come to, by kind. The exit code is 1 if something does not hold in a round of this run.
"""

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import Annotated

import typer

from rollout_client import AsyncRolloutClient
from tests.endurance.chaos.counted_puzzle import StepLog
from tests.endurance.chaos.nodes.several_nodes import NODE_KINDS, several_nodes
from tests.endurance.chaos.one_machine import one_machine
from tests.endurance.chaos.parts import DRAINED, KILLED, PARTS, STOPPED
from tests.endurance.chaos.results import Round, by_kind, in_turn
from tests.endurance.chaos.rounds import Chaos, Struck
from tests.endurance.program import append, console, ended_services, finish, listed, read


async def chaos(service: Struck, kinds: Iterator[str], steps: StepLog, seed: int, file: Path) -> list[str]:
    """Plays the rounds, and returns what did not hold in them."""
    problems: list[str] = []
    async with AsyncRolloutClient(service.url) as client:
        begun = await Chaos.begin(service, client, steps, seed)
        console.print(f"Undisturbed, the games take {begun.undisturbed.seconds:.1f} s.")
        async with aclosing(begun.rounds(kinds)) as rounds:
            async for one in rounds:
                append(file, one)
                problems += one.problems()
                console.print(f"{one.kind}: {one.seconds:.1f} s; {len(problems)} problems")
    return problems


def chosen_kinds(named: str) -> Sequence[str]:
    """Those of one service: on this machine alone, or on several nodes."""
    groups = {"all": list(KILLED), "stopped": list(STOPPED), "drained": list(DRAINED), "nodes": list(NODE_KINDS)}
    kinds = groups.get(named) or listed(named, [*PARTS, *NODE_KINDS])
    if NODE_KINDS.keys() & kinds and PARTS.keys() & kinds:
        raise typer.BadParameter(f"{' and '.join(NODE_KINDS)} need a service of their own: run them alone")
    return kinds


def main(
    kind: Annotated[str, typer.Option(help="Kinds with commas between them, or all, stopped, drained, nodes.")] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Of each kind, those in the file among them.")] = 20,
    minutes: Annotated[float, typer.Option(min=0, help="No round begins later than so long after the start.")] = 600,
    results: Annotated[Path, typer.Option(help="The file that rounds are appended to.")] = Path("chaos.jsonl"),
) -> None:
    kinds, before = chosen_kinds(kind), read(results, Round)
    left = in_turn(kinds, rounds, before, minutes)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        steps_file = Path(folder, "steps")
        on_nodes = NODE_KINDS.keys() & kinds
        running: AbstractContextManager[Struck] = (several_nodes if on_nodes else one_machine)(steps_file)
        with ended_services(), running as service:
            # Each run draws other moments.
            problems = asyncio.run(chaos(service, left, StepLog(steps_file), len(before), results))
    finish(problems, {"kinds": by_kind(read(results, Round))})


if __name__ == "__main__":
    typer.run(main)
