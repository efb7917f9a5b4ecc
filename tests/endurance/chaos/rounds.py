"""Rounds of chaos in one running service: all games are played, and at a random moment a part of it is struck."""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Protocol

from rollout_client import AsyncRolloutClient
from rollout_client.contract.rollouts import SampleInput
from tests.endurance.chaos.counted_puzzle import StepLog, turns_done_again
from tests.endurance.chaos.games import ROLLOUTS, Games, Outcome
from tests.endurance.chaos.parts import TASK_NAME
from tests.endurance.chaos.results import Round

ROUND_TIMEOUT_S = 240.0
RECOVERED_WITHIN_S = 180.0
EARLIEST_STRIKE, LATEST_STRIKE = 0.05, 0.8
"""As shares of what the undisturbed games take."""
POLL_S = 0.25
SEED = 11
"""Of the games."""


class GamesNotRepeatable(Exception):
    """Two undisturbed runs of the same games came to different results: a disturbed one could not be judged."""


class Struck(Protocol):
    """The service whose parts are struck; `OneMachine` and `SeveralNodes` implement it."""

    url: str

    def shared(self, kind: str) -> object:
        """Rounds of kinds for which this is equal are played one after the other, each with all replicas in place."""
        ...

    async def is_whole(self, kind: str) -> bool:
        """Whether what a round of this kind can strike is all there."""
        ...

    def strike(self, kind: str, draw: random.Random) -> Callable[[], Awaitable[bool]]:
        """Strikes a part. What is returned tells whether it was replaced."""
        ...


@dataclass(slots=True)
class Chaos:
    """Plays rounds one after the other, with a part that was struck being replaced meanwhile."""

    service: Struck
    client: AsyncRolloutClient
    steps: StepLog
    draw: random.Random
    games: list[SampleInput]
    undisturbed: Outcome

    @classmethod
    async def begin(cls, service: Struck, client: AsyncRolloutClient, steps: StepLog, seed: int) -> "Chaos":
        """Raises `GamesNotRepeatable` unless the games come to the same results twice."""
        games = await client.example_samples(TASK_NAME, ROLLOUTS, seed=SEED)
        first = await Games(client, games).play()
        second = await Games(client, games).play()
        if first.lost() or second.lost() or second.changed_from(first):
            raise GamesNotRepeatable(
                f"Undisturbed, {first.lost()} and {second.lost()} of {ROLLOUTS} rollouts were lost, and "
                f"{second.changed_from(first)} differed: {[*first.errors, *second.errors]}"
            )
        return cls(service, client, steps, random.Random(seed), games, min(first, second, key=lambda run: run.seconds))

    async def rounds(self, kinds: Iterable[str]) -> AsyncGenerator[Round, None]:
        """Plays a round of each of `kinds`, in this order, and yields it when what it struck was replaced.

        The next round of a kind that shares nothing with it begins before that.
        """
        under_way: dict[asyncio.Task[Round], object] = {}
        for kind in kinds:
            shared = self.service.shared(kind)
            if busy := [task for task, other in under_way.items() if other == shared]:
                await asyncio.wait(busy)
            for task in [task for task in under_way if task.done()]:
                del under_way[task]
                yield task.result()
            async with asyncio.timeout(RECOVERED_WITHIN_S):
                await until(partial(self.service.is_whole, kind))
            under_way[await self._round(kind)] = shared
        for task in under_way:
            yield await task

    async def _round(self, kind: str) -> "asyncio.Task[Round]":
        """Returns when the games have ended; the task then ends when the part is there again."""
        while True:
            steps_before = self.steps.end()
            games = Games(self.client, self.games)
            playing = asyncio.create_task(games.play())
            after_s = self.draw.uniform(EARLIEST_STRIKE, LATEST_STRIKE) * self.undisturbed.seconds
            await asyncio.sleep(after_s)
            if len(games.outcome.results) < ROLLOUTS:
                break
            # They were faster than ever: that was no round.
            await playing
        recovering = asyncio.create_task(seconds_until(self.service.strike(kind, self.draw)))
        began = monotonic()
        try:
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                await playing
        except TimeoutError:
            games.outcome.errors.append(f"the games had not ended {ROUND_TIMEOUT_S:g} s after the strike")
        seconds = monotonic() - began + after_s
        again = turns_done_again(self.steps.since(steps_before))

        async def finished() -> Round:
            outcome = games.outcome
            return Round(
                kind=kind,
                rollouts=ROLLOUTS,
                seconds=round(seconds, 2),
                recovered_after_s=await recovering,
                lost=outcome.lost(),
                twice=outcome.twice,
                changed=outcome.changed_from(self.undisturbed),
                errors=outcome.errors,
                turns_again=again.total(),
                most_turns_again=max(again.values(), default=0),
            )

        return asyncio.create_task(finished())


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():
        await asyncio.sleep(POLL_S)


async def seconds_until(is_replaced: Callable[[], Awaitable[bool]]) -> float | None:
    """`None` if it took more than `RECOVERED_WITHIN_S`."""
    began = monotonic()
    with suppress(TimeoutError):
        async with asyncio.timeout(RECOVERED_WITHIN_S):
            await until(is_replaced)
            return round(monotonic() - began, 2)
    return None
