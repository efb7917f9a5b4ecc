"""Weights that a trainer on the same fabric sends straight into the engines, by vLLM's weight-transfer engines.

The trainer's side believes in one engine; here it meets all replicas, each at ranks of its own. Guarantees: no replica
that has not met the trainer is left out of a transfer, it has to begin anew; a transfer that breaks or is abandoned
midway leaves no replica with half of the weights, all of them are replaced.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from deployments.policy_failures import TransferRefused
from deployments.policy_records import Command, FinishTransfer, InitTransfer, StartTransfer, SwapOptions, UpdateTransfer
from deployments.policy_update import Fleet, error_of, outcome
from deployments.roster import Member
from rollout_client.contract import FieldProblem
from rollout_client.policy import ReplicaUpdate

TRAINER_RANKS = 1


class Transfer:
    """Args: `idle_s` is after how many silent seconds a trainer that has started a transfer is given up."""

    def __init__(self, fleet: Fleet, idle_s: float) -> None:
        self._fleet = fleet
        self._idle_s = idle_s
        self._met: list[Member] = []
        self._release: Callable[[], None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None

    @property
    def is_under_way(self) -> bool:
        return self._release is not None

    async def init(self, init_info: dict[str, Any]) -> int:
        """Returns the world size."""
        members = self._fleet.roster.members
        world_size = TRAINER_RANKS + sum(member.introduction.workers for member in members)
        if init_info.get("world_size") != world_size:
            message = f"{world_size} processes take part: the trainer's one and {world_size - 1} of the replicas"
            raise refused("init_info.world_size", message, init_info.get("world_size"))
        self._met = []
        commands = [
            InitTransfer({**init_info, "rank_offset": rank_offset})
            for rank_offset in rank_offsets([member.introduction.workers for member in members])
        ]
        answers = await asyncio.gather(*map(self._fleet.ask, members, commands))
        if errors := [error for error in map(error_of, answers) if error is not None]:
            raise refused("init_info", f"a replica could not meet the trainer: {errors[0]}")
        self._met = members
        return world_size

    async def start(self, options: SwapOptions, release: Callable[[], None]) -> None:
        """`release` is called if it does not come to its end; one that is finished is the caller's to release."""
        if not self._met or self._met != self._fleet.roster.members:
            release()
            raise refused("transfer", "the replicas are others than those that met the trainer; init it again")
        self._release = release
        await self._ask_all(StartTransfer(options))

    async def update(self, update_info: Any) -> None:
        self._refuse_unless_under_way()
        await self._ask_all(UpdateTransfer(update_info))

    async def finish(self, version: int, make_durable: Callable[[], None]) -> list[ReplicaUpdate]:
        self._refuse_unless_under_way()
        self._stop_watching()
        members = self._met
        make_durable()
        finished = await self._fleet.ask_all(members, FinishTransfer(version))
        self._release = None
        return [outcome(self._fleet, member, answer, answer) for member, answer in zip(members, finished, strict=True)]

    async def _ask_all(self, command: Command) -> None:
        self._stop_watching()
        answers = await self._fleet.ask_all(self._met, command)
        if errors := [error for error in map(error_of, answers) if error is not None]:
            self._abandon(errors[0])
            raise refused("transfer", f"it broke and every replica is replaced: {errors[0]}")
        self._watchdog = asyncio.get_running_loop().call_later(
            self._idle_s, self._abandon, "nothing was heard from the trainer"
        )

    def _abandon(self, why: str) -> None:
        self._stop_watching()
        for member in self._met:
            self._fleet.give_up(member, why)
        self._met = []
        release, self._release = self._release, None
        if release is not None:
            release()

    def _stop_watching(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _refuse_unless_under_way(self) -> None:
        if not self.is_under_way:
            raise refused("transfer", "none is under way; start it first, or it was abandoned")


def rank_offsets(workers: Sequence[int]) -> list[int]:
    """The first rank of each replica: the trainer is rank 0, and each worker of each replica has one of its own."""
    return [TRAINER_RANKS + sum(workers[:place]) for place in range(len(workers))]


def refused(field: str, message: str, value: Any = None) -> TransferRefused:
    return TransferRefused(FieldProblem(field=field, message=message, value=value))
