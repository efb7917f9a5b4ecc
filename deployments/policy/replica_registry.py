"""The generator replicas as the policy store knows them, and how it gives them orders.

Replicas ask for their next order and report the last one with it; Serve's handles cannot single a replica out, nor do
they know one that is still starting. Guarantees: each numbered reaches the replica it is for at most once, and whoever
waits for its report is told when the replica died, came back anew, or took too long.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from deployments.policy.command_source import ReplicaNotRegistered
from deployments.policy.commands import Command, CommandReport, LoadedWeights, NumberedCommand, ReplicaRegistration

LONG_POLL_S = 20.0
LIVENESS_POLL_S = 0.5


class ReplicaLost(Exception):
    """The replica will not report; the message says why."""


@dataclass(eq=False)
class RegisteredReplica:
    registration: ReplicaRegistration
    loaded: LoadedWeights
    accepts_requests: bool = False
    """Whether it was told that it is current; one that only starts is not ready before."""
    checksum: str | None = None
    """Of the weights in its engine; `None` until it has told it."""
    commands: "asyncio.Queue[NumberedCommand]" = field(default_factory=asyncio.Queue)
    awaited: "dict[int, asyncio.Future[CommandReport]]" = field(default_factory=dict)

    @property
    def replica_id(self) -> str:
        return self.registration.replica_id


class ReplicaRegistry:
    """Args: `is_alive` says of a replica's actor whether it lives."""

    def __init__(self, is_alive: Callable[[Any], Awaitable[bool]]) -> None:
        self._is_alive = is_alive
        self._members: dict[str, RegisteredReplica] = {}
        self._numbers = count(1)

    @property
    def members(self) -> list[RegisteredReplica]:
        """In the order in which they joined."""
        return list(self._members.values())

    def register(self, registration: ReplicaRegistration) -> RegisteredReplica:
        """A replica that was a member already begins anew: what was ordered before is lost."""
        self.forget(registration.replica_id, "it joined anew")
        member = self._members[registration.replica_id] = RegisteredReplica(registration, registration.loaded)
        return member

    def has(self, member: RegisteredReplica) -> bool:
        """Whether it is neither forgotten nor joined anew."""
        return self._members.get(member.replica_id) is member

    def forget(self, replica_id: str, why: str) -> None:
        member = self._members.pop(replica_id, None)
        for awaited in member.awaited.values() if member else ():
            if not awaited.done():
                awaited.set_exception(ReplicaLost(why))

    async def forget_the_dead(self) -> None:
        members = self.members
        alive = await asyncio.gather(*(self._is_alive(member.registration.actor) for member in members))
        for member, lives in zip(members, alive, strict=True):
            if not lives and self.has(member):
                self.forget(member.replica_id, "it died")

    async def next_command(self, replica_id: str, report: CommandReport | None) -> NumberedCommand | None:
        """Takes the report of the last order, and answers the next one; `None` if none came for a while.

        Raises:
            ReplicaNotRegistered: the replica has to join first.
        """
        member = self._member(replica_id)
        if report is not None:
            if report.loaded != member.loaded:
                member.loaded, member.checksum = report.loaded, None
            awaited = member.awaited.pop(report.command_number, None)
            if awaited is not None and not awaited.done():
                awaited.set_result(report)
        try:
            async with asyncio.timeout(LONG_POLL_S):
                return await member.commands.get()
        except TimeoutError:
            return None

    def record_checksum(self, replica_id: str, loaded: LoadedWeights, checksum: str) -> None:
        """Raises `ReplicaNotRegistered`."""
        member = self._member(replica_id)
        if member.loaded == loaded:
            member.checksum = checksum

    async def ask(self, member: RegisteredReplica, command: Command, timeout_s: float) -> CommandReport:
        """Gives the order and waits for its report.

        Raises:
            ReplicaLost: there will be none.
        """
        if not self.has(member):
            raise ReplicaLost("it has left")
        numbered = NumberedCommand(next(self._numbers), command)
        report: asyncio.Future[CommandReport] = asyncio.get_running_loop().create_future()
        member.awaited[numbered.number] = report
        member.commands.put_nowait(numbered)
        watch = asyncio.create_task(self._forget_if_dead(member))
        try:
            async with asyncio.timeout(timeout_s):
                return await report
        except TimeoutError:
            raise ReplicaLost(f"it did not report within {timeout_s:g} s") from None
        finally:
            watch.cancel()
            member.awaited.pop(numbered.number, None)

    async def _forget_if_dead(self, member: RegisteredReplica) -> None:
        while await self._is_alive(member.registration.actor):
            await asyncio.sleep(LIVENESS_POLL_S)
        if self.has(member):
            self.forget(member.replica_id, "it died")

    def _member(self, replica_id: str) -> RegisteredReplica:
        if replica_id not in self._members:
            raise ReplicaNotRegistered(replica_id)
        return self._members[replica_id]
