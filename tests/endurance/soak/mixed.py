"""Requests of every kind for a while, with pushes of weights and killed parts: `python -m tests.endurance soak`.

The service runs as `make serve` runs it, with adapters, jobs, sessions, and two replicas of what rollouts need. Callers
stream rollouts, ask for whole answers and scores, follow jobs and delete some, play agents in sessions, and go away in
the middle. Meanwhile one part after the other is killed; when it has been replaced, weights of every kind are pushed
until the next one's turn comes.
Each third of the run kills the same parts at the same times, always the youngest process: of what there are two of,
one lives from the begin to the end, and its memory is measured. It must hold:

- nothing grows: memory, descriptors, threads, shared memory, files, logs, tasks of asyncio, requests of the engines;
  `tests/endurance/growth.py` has the rule, `resources.py` the bounds;
- every rollout comes back without an error, and its spans are right; only a stream that went through a killed ingress
  replica breaks;
- when the load has ended, nothing runs any longer within `SETTLED_WITHIN_S`, and there are no more tasks than before;
- at the end all replicas hold the version that was acknowledged last, and greedy rollouts have the log-probabilities
  that transformers computes with its weights.

With `--no-kills` nothing is killed, and no call of a streamed rollout may be repeated.

The last line is JSON. The exit code is 1 if something does not hold.
"""

import asyncio
from collections import defaultdict
from functools import partial
from time import monotonic
from typing import Annotated

import torch
import typer

from rollout_client import AsyncRolloutClient
from tests.endurance.chaos.one_machine import OneMachine
from tests.endurance.chaos.parts import PARTS, TASK_NAME
from tests.endurance.chaos.rounds import POLL_S, RECOVERED_WITHIN_S, until
from tests.endurance.growth import growth_problems, medians
from tests.endurance.program import console, ended_services, finish
from tests.endurance.soak.callers import calling
from tests.endurance.soak.known_weights import KnownWeights
from tests.endurance.soak.mixed_load import SAMPLE_RETRIES, MixedLoad
from tests.endurance.soak.replica_counts import left_over, most_of, replica_counts
from tests.endurance.soak.resources import BOUNDS, ServiceResources
from tests.endurance.soak.settled import logprob_problems, problems_at_the_end
from tests.endurance.soak.slots import THIRDS, Slot, slots
from tests.endurance.soak.soaked_service import SoakedService, soaked_service
from tests.endurance.soak.trainer import Trainer
from tests.endurance.soak.version_times import VersionTimes

REPLICAS = {"Ingress": 2, "Generator": 2, TASK_NAME: 2, "Policy": 1, "Jobs": 1, "Sessions": 1}
KINDS = ("generator", "ingress", "environment", "store", "jobs", "engine-core", "controller")
"""The parts that are killed, in this order; a short run kills the first of them."""
BREAK_STREAMS = {"ingress"}
BREAK_CALLS = BREAK_STREAMS | {"generator", "engine-core"}
"""A stream of the model server's API ends with the engine under it."""
WARM_UP_S = 15.0
SETTLED_WITHIN_S = 20.0
LOOKS = 5
PUSH_EVERY_S = 1.5


class MixedSoak:
    """One run on a running service; `kills` says whether parts of it are killed."""

    def __init__(self, service: SoakedService, client: AsyncRolloutClient, kills: bool) -> None:
        self._client = client
        self._kills = kills
        self._known, self._times = KnownWeights(service.model), VersionTimes()
        self._trainer = Trainer(client, self._known, self._times, service.checkpoints)
        self._load = MixedLoad(client, service.url, self._times, SAMPLE_RETRIES if kills else 0)
        self.problems = self._load.problems
        self._machine = OneMachine(service.url, REPLICAS)
        self._resources = ServiceResources(service.temporary)
        self._readings: dict[int, list[dict[str, float]]] = defaultdict(list)
        """By the third of the run; one after each push."""
        self._recovered_after_s: dict[str, list[float]] = defaultdict(list)
        """By the kind of the part that was killed."""

    async def run(self, minutes: float) -> None:
        async with calling(self._load.posts, self.problems):
            await asyncio.sleep(WARM_UP_S)
        idle = await self._idle()
        began = monotonic()
        async with calling(self._load.posts, self.problems):
            for slot in slots(60 * minutes, KINDS):
                if self._kills:
                    await self._kill(slot.kind)
                await self._push_until(slot, began + slot.ends_after_s)
                console.print(f"After {monotonic() - began:.0f} s, {slot.kind}:", self._load.ended, *self.problems[-1:])
        if left := await self._left_over(idle):
            self.problems.append(f"{SETTLED_WITHIN_S:g} s after the load ended there were still: {left}")
        self.problems += self._broken_streams()
        # All replicas hold the version that was acknowledged last, and generate with its weights.
        newest = self._times.newest
        self.problems += await problems_at_the_end(self._client, newest)
        self.problems += await logprob_problems(self._client, self._known, newest, self._trainer.state)
        self.problems += growth_problems(*self._periods(), BOUNDS)

    async def _kill(self, kind: str) -> None:
        """Kills the youngest process of the part, so that the oldest one shows what a process leaks, and waits."""
        began = monotonic()
        try:
            async with asyncio.timeout(RECOVERED_WITHIN_S):
                await until(partial(self._machine.is_whole, kind))
                await until(self._machine.strike_process(kind, PARTS[kind].processes()[-1]))
        except TimeoutError:
            self.problems.append(f"{kind} was not replaced within {RECOVERED_WITHIN_S:g} s")
        self._recovered_after_s[kind].append(round(monotonic() - began, 1))

    async def _push_until(self, slot: Slot, end: float) -> None:
        """Pushes versions, at least `slot.fewest_pushes`, and looks at the service after each."""
        readings = self._readings[slot.third]
        enough = len(readings) + slot.fewest_pushes
        while monotonic() < end or len(readings) < enough:
            await self._trainer.push()
            readings.append(await asyncio.to_thread(self._resources.read))
            await asyncio.sleep(PUSH_EVERY_S)

    async def _idle(self) -> dict[str, float]:
        """What runs while nothing is asked for: the most of several looks, after everything has ended."""
        await self._left_over({})
        looks = []
        for _ in range(LOOKS):
            await asyncio.sleep(1)
            looks.append(await asyncio.to_thread(replica_counts))
        return most_of(looks)

    async def _left_over(self, idle: dict[str, float]) -> dict[str, float]:
        """What still runs after all, when nothing does or `SETTLED_WITHIN_S` are over."""
        until = monotonic() + SETTLED_WITHIN_S
        while True:
            left = left_over(idle, await asyncio.to_thread(replica_counts))
            if not left or monotonic() > until:
                return left
            await asyncio.sleep(POLL_S)

    def _broken_streams(self) -> list[str]:
        """Each caller has one stream at a time, and a kill can break it once."""
        found = []
        for name, kinds in (("broken streams", BREAK_STREAMS), ("broken calls", BREAK_CALLS)):
            kills = sum(len(self._recovered_after_s.get(kind, ())) for kind in kinds)
            most = kills * len(self._load.posts)
            if self._load.ended[name] > most:
                found.append(f"There are {self._load.ended[name]} {name}, and at most {most} can be")
        return found

    def _periods(self) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        return self._readings[THIRDS - 2], self._readings[THIRDS - 1]

    def figures(self) -> dict[str, object]:
        return {
            "requests": dict(self._load.ended),
            "pushes": sum(map(len, self._readings.values())),
            "refused": self._trainer.refused,
            "recovered_after_s": dict(self._recovered_after_s),
            "medians_of_thirds": medians(*self._periods()),
        }


async def soak(service: SoakedService, minutes: float, kills: bool) -> MixedSoak:
    torch.set_num_threads(1)
    async with AsyncRolloutClient(service.url) as client:
        soaking = MixedSoak(service, client, kills)
        await soaking.run(minutes)
    return soaking


def main(
    minutes: Annotated[float, typer.Option(min=1, help="Of load, after the warm-up.")] = 15,
    kills: Annotated[bool, typer.Option(help="Without them no call of a rollout may be repeated.")] = True,
) -> None:
    with ended_services(), soaked_service(REPLICAS) as service:
        ended = asyncio.run(soak(service, minutes, kills))
    finish(ended.problems, ended.figures())


if __name__ == "__main__":
    typer.run(main)
