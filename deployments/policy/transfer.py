"""Weights that a trainer on the same fabric sends straight into the engines, by vLLM's weight-transfer engines.

The trainer's side believes in one engine; here it meets all replicas, each at ranks of its own. Guarantees: no replica
that has not met the trainer is left out of a transfer, it has to begin anew; a transfer that breaks or is abandoned
midway leaves no replica with half of the weights, all of them are replaced.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from deployments.policy.commands import (
    ApplyTransfer,
    Command,
    FinishTransfer,
    InitTransfer,
    StartTransfer,
    SwapOptions,
    UpdateTransfer,
)
from deployments.policy.failures import TransferRefused
from deployments.policy.replica_registry import RegisteredReplica
from deployments.policy.update import Answer, Fleet, error_of, outcome
from rollout_client.policy_contract import ReplicaUpdate
from rollout_client.problem_contract import FieldProblem

TRAINER_RANKS = 1
UpdateInfo = dict[str, Any] | list[dict[str, Any]]


class Transfer:
    """Args: `idle_s` is after how many silent seconds a trainer that has started a transfer is given up."""

    def __init__(self, fleet: Fleet, idle_s: float) -> None:
        self._fleet = fleet
        self._idle_s = idle_s
        self._met: list[RegisteredReplica] = []
        self._step = asyncio.Lock()
        self._release: Callable[[], None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None

    @property
    def is_under_way(self) -> bool:
        return self._release is not None

    async def init(self, init_info: dict[str, Any]) -> int:
        """Returns the world size."""
        members = self._fleet.registry.members
        if not members:
            raise refused("transfer", "no replica is there yet; wait until the service is ready")
        workers = workers_of(members)
        world_size = TRAINER_RANKS + sum(workers)
        if init_info.get("world_size") != world_size:
            message = f"{world_size} processes take part: the trainer's one and {world_size - 1} of the replicas"
            raise refused("init_info.world_size", message, init_info.get("world_size"))
        self._met = []
        commands = [InitTransfer({**init_info, "rank_offset": rank_offset}) for rank_offset in rank_offsets(workers)]
        # All are waited for, also when one has failed: what goes on waiting for the trainer must not meet the next one.
        answers = await asyncio.gather(*map(self._fleet.ask, members, commands))
        if errors := errors_in(answers):
            raise refused("init_info", f"a replica could not meet the trainer: {errors[0]}")
        self._met = members
        return world_size

    async def start(self, options: SwapOptions, release: Callable[[], None]) -> None:
        """`release` is called if it does not come to its end; one that is finished is the caller's to release."""
        async with self._step:
            self._release = release
            try:
                await self._fleet.registry.forget_the_dead()
                if not self._met or self._met != self._fleet.registry.members:
                    raise refused("transfer", "the replicas are others than those that met the trainer; init it again")
                await self._ask_all([StartTransfer(options)] * len(self._met))
            except BaseException:
                self._let_go()
                raise

    async def update(self, update_info: UpdateInfo) -> None:
        async with self._step:
            self._refuse_unless_under_way()
            await self._ask_all([UpdateTransfer(share) for share in shares(update_info, workers_of(self._met))])

    async def finish(self, version: int, make_durable: Callable[[], None]) -> list[ReplicaUpdate]:
        """The version is made only where at least one replica holds it."""
        async with self._step:
            self._refuse_unless_under_way()
            self._stop_watching()
            members = self._met
            settled = dict(zip(members, await self._fleet.ask_all(members, ApplyTransfer()), strict=True))
            if len(errors := errors_in(list(settled.values()))) == len(members):
                raise self._broken(errors[0])
            try:
                make_durable()
            except BaseException as failure:
                self._abandon(f"the version could not be kept: {failure}")
                raise
            ready = [member for member, answer in settled.items() if error_of(answer) is None]
            finished = dict(zip(ready, await self._fleet.ask_all(ready, FinishTransfer(version)), strict=True))
            self._release = None
            return [
                outcome(self._fleet, member, settled[member], finished.get(member, settled[member]))
                for member in members
            ]

    async def _ask_all(self, commands: Sequence[Command]) -> None:
        """The first replica that fails ends it for all: the others would wait for a trainer that waits for that one."""
        self._stop_watching()
        for answer in asyncio.as_completed(map(self._fleet.ask, self._met, commands)):
            if (error := error_of(await answer)) is not None:
                raise self._broken(error)
        self._watchdog = asyncio.get_running_loop().call_later(
            self._idle_s, self._abandon, "nothing was heard from the trainer"
        )

    def _broken(self, error: str) -> TransferRefused:
        self._abandon(error)
        return refused("transfer", f"it broke and every replica is replaced: {error}")

    def _abandon(self, why: str) -> None:
        self._stop_watching()
        for member in self._met:
            self._fleet.give_up(member, why)
        self._met = []
        self._let_go()

    def _let_go(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()

    def _stop_watching(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _refuse_unless_under_way(self) -> None:
        if not self.is_under_way:
            raise refused("transfer", "none is under way; start it first, or it was abandoned")


def workers_of(members: Sequence[RegisteredReplica]) -> list[int]:
    return [member.registration.workers for member in members]


def errors_in(answers: Sequence[Answer]) -> list[str]:
    return [error for error in map(error_of, answers) if error is not None]


def rank_offsets(workers: Sequence[int]) -> list[int]:
    """The first rank of each replica: the trainer is rank 0, and each worker of each replica has one of its own."""
    return [TRAINER_RANKS + sum(workers[:place]) for place in range(len(workers))]


def shares(update_info: UpdateInfo, workers: Sequence[int]) -> list[UpdateInfo]:
    """What each replica is told: all the same, but of a list with one entry for each worker its own workers'."""
    if not isinstance(update_info, list):
        return [update_info] * len(workers)
    if len(update_info) != sum(workers):
        raise refused("update_info", f"{sum(workers)} workers take part, one entry each", len(update_info))
    return [update_info[sum(workers[:place]) : sum(workers[: place + 1])] for place in range(len(workers))]


def refused(field: str, message: str, value: Any = None) -> TransferRefused:
    return TransferRefused(FieldProblem(field=field, message=message, value=value))
