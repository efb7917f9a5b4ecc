"""Kills agents with sessions, and replicas that work for them (`tests.endurance chaos-sessions`).

The service has two ingress and two generator replicas. In each round ten agents are at work, each a process with a
session, which asks without end. At a random moment there is a SIGKILL, by the kind of the round: for all agents
(`agent`), for an ingress or a generator replica. It must hold:

- a second later no engine generates for nobody: for an agent that is gone, for a call whose caller is gone;
- the record of each session is readable, also when a replica was killed, and has each answer that its agent got once,
  token by token; beside these only what calls had generated that broke.

The rounds are appended to a file, and what is there already is not played again. The last line is JSON: what all
rounds in that file come to, by kind. The exit code is 1 if something does not hold in a round of this run.
"""

import asyncio
import random
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollout_client import AsyncRolloutClient
from tests.endurance.chaos.one_machine import OneMachine
from tests.endurance.chaos.sessions.results import SessionRound, totals
from tests.endurance.chaos.sessions.rounds import KINDS, NotBegun, SessionRounds
from tests.endurance.chaos.sessions.service import service_of_sessions
from tests.endurance.result_lines import read
from tests.endurance.running import in_turn, played, report, running

MOST_NOT_BEGUN = 5
Rounds = AsyncGenerator[SessionRound, None]
console = Console(stderr=True)


async def play(service: OneMachine, kinds: Iterator[str], answers: Path, draw: random.Random) -> Rounds:
    not_begun = 0
    async with AsyncRolloutClient(service.url) as client:
        rounds = SessionRounds(service, client, answers, draw)
        for kind in kinds:
            try:
                yield await rounds.play(kind)
            except NotBegun as error:
                not_begun += 1
                console.print(f"{kind}: {error}")
                if not_begun > MOST_NOT_BEGUN:
                    raise


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    kind: Annotated[str, typer.Option(help="Kinds with commas between them, or all.")] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Of each kind, those in the file among them.")] = 10,
    minutes: Annotated[float, typer.Option(min=0, help="No round begins later than so long after the start.")] = 600,
    results: Annotated[Path, typer.Option(help="The file that rounds are appended to.")] = Path("chaos_sessions.jsonl"),
    seed: Annotated[int | None, typer.Option(help="Of the moments and the choice of replicas.")] = None,
) -> None:
    before = read(results, SessionRound)
    left = in_turn(KINDS if kind == "all" else kind.split(","), rounds, before, minutes)
    draw = random.Random(len(before) if seed is None else seed)
    with (
        tempfile.TemporaryDirectory(prefix="chaos-sessions-") as folder,
        running(console, service_of_sessions(config, console)) as service,
    ):
        finished = asyncio.run(played(console, results, play(service, left, Path(folder), draw)))
    report(console, finished, results, SessionRound, totals)


if __name__ == "__main__":
    typer.run(main)
