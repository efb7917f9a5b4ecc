"""Kills processes at random moments of updates while rollouts go on: `python -m tests.endurance soak-weights-kills`.

Updates are full weights and deltas by turns. Each is pushed by a client process of its own. At a random moment the
policy store, a generator replica or the client is killed with SIGKILL. A client that was killed is started again, as
its trainer would be, and pushes the same weights as the next version. It must hold:

- after each update the version that was acknowledged is current, with the bytes that were sent;
- every rollout comes back without an error, with right spans (`span_check.py`);
- at the end all replicas hold the version that was acknowledged last, and generate with its weights.

The last line is JSON. The exit code is 1 if something does not hold.
"""

import asyncio
import random
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Annotated

import torch
import typer
from rich.console import Console
from safetensors.torch import save_file

from benchmarks.reference_model import State
from rollout_client import AsyncRolloutClient
from rollout_client.weights.checksum import file_checksum
from tests.endurance.chaos.parts import KILLED
from tests.endurance.reporting import finish, rounds_shown
from tests.endurance.running import running
from tests.endurance.soak.known_weights import KnownWeights
from tests.endurance.soak.logprob_check import logprob_differences
from tests.endurance.soak.settled import problems_at_the_end
from tests.endurance.soak.soaked_service import SoakedService, soaked_service
from tests.endurance.soak.steady_rollouts import RolloutTally, SteadyRollouts
from tests.endurance.soak.version_times import VersionTimes

CLIENT = "client"
VICTIMS = ("store", "generator", CLIENT)
"""The client, and parts of the service as `python -m tests.endurance chaos` calls them."""
USUAL_S = 1.0
"""What a push takes, at first; then what the last one took that nothing was killed in."""
LATEST_KILL = 1.2
"""As a share of what a push usually takes: some kills come after the push has ended."""
UPDATE_TIMEOUT_S = 240.0
SAMPLE_RETRIES = 8
"""A killed replica costs every rollout that it plays one, and its successor may be killed too."""
console = Console(stderr=True)


@dataclass(slots=True)
class Kills:
    """What came of the rounds."""

    killed: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    pushed_again: int = 0
    """Updates whose client was killed before it was answered, or was answered by an error."""
    rollouts: RolloutTally = field(default_factory=RolloutTally)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FilePush:
    """
    Args:
        checksum: of the full weights.
        base: the version that the file, a delta, changes; `None` for full weights.
    """

    file: Path
    checksum: str
    base: int | None

    def arguments(self) -> list[str]:
        """Of the uploading client."""
        base = [] if self.base is None else ["--base", str(self.base)]
        return [str(self.file), "--checksum", self.checksum, *base]


def written(folder: Path, known: KnownWeights, before: State, state: State, base: int | None) -> FilePush:
    """Writes `state` as full weights, or as a delta of `before`, which is version `base`."""
    full, delta = folder / "full.safetensors", folder / "delta.safetensors"
    save_file(state, full)
    checksum = file_checksum(full)
    if base is None:
        return FilePush(full, checksum, base)
    save_file(known.delta(before, state), delta)
    return FilePush(delta, checksum, base)


class KillRounds:
    """
    Args:
        victims: from which one is drawn for each update.
    """

    def __init__(
        self, service: SoakedService, client: AsyncRolloutClient, victims: Sequence[str], draw: random.Random
    ) -> None:
        self.kills = Kills()
        self.times = VersionTimes()
        self._service = service
        self._client = client
        self._victims = victims
        self._draw = draw
        self._usual_s = USUAL_S

    async def update(self, push: FilePush) -> None:
        """Pushes the file until that is acknowledged, and kills something meanwhile, once."""
        victim: str | None = self._draw.choice(self._victims)
        while True:
            version = await self._push(push, victim)
            if version is not None:
                break
            self.kills.pushed_again += 1
            victim = None
        self.kills.acknowledged += 1
        state = await self._client.policy.state()
        stored = {info.version: info.checksum for info in state.versions}
        if state.current != version or stored.get(version) != push.checksum:
            self.kills.problems.append(f"version {version} was acknowledged, and {state.current} is current: {stored}")

    async def _push(self, push: FilePush, victim: str | None) -> int | None:
        """Returns the version that was acknowledged, if one was."""
        arguments = ["-m", "tests.endurance.soak.uploading_client", self._service.url, *push.arguments()]
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=PIPE, stderr=PIPE)
        assert process.stdout is not None
        began = await process.stdout.readline()
        sent_at = monotonic()
        if began:
            self.times.send(int(began), sent_at)
        killing = asyncio.create_task(self._kill(victim, process))
        try:
            async with asyncio.timeout(UPDATE_TIMEOUT_S):
                output, errors = await process.communicate()
        except TimeoutError:
            process.kill()
            output, errors = await process.communicate()
        await killing
        if output:
            self.times.acknowledge(int(output), monotonic())
            if victim is None:
                self._usual_s = monotonic() - sent_at
            return int(output)
        if victim != CLIENT:
            self.kills.problems.append(f"after a kill of {victim}: {last_line(errors)}")
        return None

    async def _kill(self, victim: str | None, client: Process) -> None:
        if victim is None:
            return
        await asyncio.sleep(self._draw.uniform(0, LATEST_KILL * self._usual_s))
        if victim == CLIENT:
            if client.returncode is None:
                client.kill()
                self.kills.killed[victim] += 1
            return
        if found := KILLED[victim].processes():
            self._draw.choice(found).kill()
            self.kills.killed[victim] += 1


def last_line(errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "the client ended without a word"


async def kill_rounds(service: SoakedService, updates: int, replicas: int, victims: Sequence[str], seed: int) -> Kills:
    torch.set_num_threads(1)
    known = KnownWeights(service.model)
    async with AsyncRolloutClient(service.url) as client:
        rounds = KillRounds(service, client, victims, random.Random(seed))
        kills, state = rounds.kills, known.initial
        rollouts = SteadyRollouts(client, rounds.times, SAMPLE_RETRIES)
        kills.rollouts = rollouts.tally
        with rounds_shown(console, updates) as show:
            async with rollouts.running():
                for number in range(updates):
                    before, is_delta = state, number % 2 == 1
                    state = known.partly_changed(before, number) if is_delta else known.perturbed(seed + number)
                    base = rounds.times.newest if is_delta else None
                    await rounds.update(written(service.checkpoints, known, before, state, base))
                    show(description(kills))
        newest = rounds.times.newest
        kills.problems += await problems_at_the_end(client, newest, replicas)
        differences = await logprob_differences(client, known, newest, state)
        kills.problems += differences.problems(newest)
    return kills


def description(kills: Kills) -> str:
    problems = len(kills.problems) + len(kills.rollouts.problems)
    return f"killed {dict(kills.killed)}; {kills.rollouts.played} rollouts; {problems} problems"


def report(kills: Kills) -> None:
    """Raises `typer.Exit` if something does not hold."""
    figures = {
        "updates": kills.acknowledged,
        "killed": dict(kills.killed),
        "pushed_again": kills.pushed_again,
        "rollouts": kills.rollouts.played,
        "of_several_versions": kills.rollouts.of_several_versions,
    }
    finish(console, [*kills.problems, *kills.rollouts.problems], figures)


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    updates: Annotated[int, typer.Option(min=1)] = 50,
    replicas: Annotated[int, typer.Option(min=1)] = 2,
    victims: Annotated[str, typer.Option(help="Of store, generator and client, with commas between them.")] = ",".join(
        VICTIMS
    ),
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    chosen = victims.split(",")
    if unknown := set(chosen) - set(VICTIMS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: only {', '.join(VICTIMS)} can be killed")
    with running(console, soaked_service(config, {"Generator": replicas}, console)) as service:
        kills = asyncio.run(kill_rounds(service, updates, replicas, chosen, seed))
    report(kills)


if __name__ == "__main__":
    typer.run(main)
