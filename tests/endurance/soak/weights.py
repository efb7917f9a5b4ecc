"""Pushes versions of the weights for a long time while rollouts go on: `python -m tests.endurance soak-weights`.

The service runs as `make serve` runs it, with adapters. A trainer pushes full weights, deltas, adapters, checkpoints
and rollbacks, and now and then weights that have to be refused; four callers play rollouts all the time. After each
push the processes of the service are looked at from outside. It must hold:

- nothing grows: `tests/endurance/growth.py` has the rule, `resources.py` the bounds;
- every rollout comes back without an error, although none of its calls may be repeated;
- the spans of each rollout are right: `span_check.py`;
- every `CHECK_EVERY` pushes, greedy rollouts have the log-probabilities that `POST /score` and transformers compute;
- at the end, all replicas have the weights that were acknowledged last.

The last line is JSON. The exit code is 1 if something does not hold.
"""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console

from rollout_client import AsyncRolloutClient
from tests.endurance.growth import FEWEST_READINGS, Growth, all_growth, growth_problems, last_two_thirds
from tests.endurance.reporting import finish, growth_figures, rounds_shown, show_growth
from tests.endurance.running import running
from tests.endurance.soak.known_weights import KnownWeights
from tests.endurance.soak.logprob_check import LogprobDifferences, logprob_differences
from tests.endurance.soak.resources import BOUNDS, ServiceResources
from tests.endurance.soak.settled import problems_at_the_end
from tests.endurance.soak.soaked_service import SoakedService, soaked_service
from tests.endurance.soak.steady_rollouts import RolloutTally, SteadyRollouts
from tests.endurance.soak.trainer import Push, Trainer
from tests.endurance.soak.version_times import VersionTimes

CHECK_EVERY = 10
console = Console(stderr=True)


@dataclass(slots=True)
class Soaked:
    """What came of a soak."""

    pushes: list[Push] = field(default_factory=list)
    refused: int = 0
    rollouts: RolloutTally = field(default_factory=RolloutTally)
    differences: list[LogprobDifferences] = field(default_factory=list)
    readings: list[dict[str, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def growth(self) -> dict[str, Growth]:
        return all_growth(*last_two_thirds(self.readings), BOUNDS)

    def all_problems(self) -> list[str]:
        return [*self.problems, *self.rollouts.problems, *growth_problems(self.growth())]


async def soak(service: SoakedService, pushes: int, seed: int) -> Soaked:
    torch.set_num_threads(1)
    weights, times, soaked = KnownWeights(service.model), VersionTimes(), Soaked()
    resources = ServiceResources(service.temporary)
    async with AsyncRolloutClient(service.url) as client:
        trainer = Trainer(client, weights, times, service.checkpoints, seed)
        rollouts = SteadyRollouts(client, times, sample_retries=0)
        soaked.rollouts = rollouts.tally
        with rounds_shown(console, pushes) as show:
            async with rollouts.running():
                for number in range(1, pushes + 1):
                    soaked.pushes.append(await trainer.push())
                    soaked.readings.append(await asyncio.to_thread(resources.read))
                    if number % CHECK_EVERY == 0 or number == pushes:
                        await check_logprobs(client, weights, times.newest, trainer, soaked)
                    show(description(soaked))
        soaked.refused = trainer.refused
        soaked.problems += await problems_at_the_end(client, times.newest)
    return soaked


async def check_logprobs(
    client: AsyncRolloutClient, weights: KnownWeights, version: int, trainer: Trainer, soaked: Soaked
) -> None:
    differences = await logprob_differences(client, weights, version, trainer.state)
    soaked.differences.append(differences)
    soaked.problems += differences.problems(version)


def description(soaked: Soaked) -> str:
    last, reading = soaked.pushes[-1], soaked.readings[-1]
    return (
        f"{last.kind} in {last.seconds:.2f} s; {soaked.rollouts.played} rollouts; "
        f"{len(soaked.problems) + len(soaked.rollouts.problems)} problems; "
        f"store {reading.get('memory of policy store', 0) / 2**20:.0f} MiB, "
        f"engine {reading.get('memory of engine', 0) / 2**20:.0f} MiB"
    )


def report(soaked: Soaked) -> None:
    """Raises `typer.Exit` if something does not hold."""
    show_growth(console, soaked.growth())
    finish(console, soaked.all_problems(), figures(soaked))


def figures(soaked: Soaked) -> dict[str, object]:
    replicas = [replica for push in soaked.pushes for replica in push.update.replicas]
    return {
        "pushes": len(soaked.pushes),
        "kinds": dict(Counter(push.kind for push in soaked.pushes)),
        "refused": soaked.refused,
        "push_s": round(median(push.seconds for push in soaked.pushes), 3),
        "pause_s": round(median(replica.pause_s for replica in replicas), 4),
        "canary_s": round(median(push.update.canary_s for push in soaked.pushes), 4),
        "rollouts": soaked.rollouts.played,
        "of_several_versions": soaked.rollouts.of_several_versions,
        "largest_logprob_difference": round(max(max(each.score, each.reference) for each in soaked.differences), 5),
        "growth": growth_figures(soaked.growth()),
    }


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    pushes: Annotated[int, typer.Option(min=FEWEST_READINGS)] = 1000,
    replicas: Annotated[int, typer.Option(min=1)] = 1,
    seed: Annotated[int, typer.Option()] = 0,
    readings: Annotated[
        Path | None, typer.Option(help="What was held after each push is written here, as JSON.")
    ] = None,
) -> None:
    with running(console, soaked_service(config, {"Generator": replicas}, console)) as service:
        soaked = asyncio.run(soak(service, pushes, seed))
    if readings is not None:
        readings.write_text(json.dumps(soaked.readings))
    report(soaked)


if __name__ == "__main__":
    typer.run(main)
