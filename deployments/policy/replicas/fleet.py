"""The registered generator replicas together: sending them commands, and replacing those that fail."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from deployments.policy.cluster import Cluster
from deployments.policy.replicas.commands import (
    Canary,
    Command,
    CommandReport,
    Stage,
    Swap,
    SwapOptions,
    VersionPayload,
)
from deployments.policy.replicas.replica_registry import RegisteredReplica, ReplicaLost, ReplicaRegistry
from rollout_client.policy_contract import ReplicaUpdate

logger = logging.getLogger("rollout_service.policy")
CommandResult = CommandReport | ReplicaLost
GB = 10**9


@dataclass(frozen=True, slots=True)
class Fleet:
    """
    Args:
        command_timeout_s: a replica that takes longer for one command counts as lost.
        command_timeout_s_per_gb: that limit is so much longer for each gigabyte (10^9 bytes) of weights.
        canary_timeout_s: a replica that takes longer for its canary has failed it; the same addition holds.
    """

    registry: ReplicaRegistry
    cluster: Cluster
    command_timeout_s: float
    command_timeout_s_per_gb: float = 0.0
    canary_timeout_s: float = 60.0

    async def send_all(
        self, replicas: Sequence[RegisteredReplica], command: Command, size_bytes: int = 0
    ) -> list[CommandResult]:
        """Sends one command to all of them and waits for all results, in the same order."""
        return await self.send_each(replicas, [command] * len(replicas), size_bytes)

    async def send_each(
        self, replicas: Sequence[RegisteredReplica], commands: Sequence[Command], size_bytes: int = 0
    ) -> list[CommandResult]:
        """Sends each replica its command and waits for all results, in the same order."""
        sending = zip(replicas, commands, strict=True)
        return await asyncio.gather(*(self.send(replica, command, size_bytes) for replica, command in sending))

    async def send(
        self, replica: RegisteredReplica, command: Command, size_bytes: int = 0, timeout_s: float | None = None
    ) -> CommandResult:
        """
        Args:
            size_bytes: of the weights that the command is about.
            timeout_s: in place of the limit that follows from the size.
        """
        if timeout_s is None:
            timeout_s = self.command_timeout_s + self.command_timeout_s_per_gb * size_bytes / GB
        try:
            return await self.registry.send(replica, command, timeout_s)
        except ReplicaLost as lost:
            return lost

    async def send_canary(self, replica: RegisteredReplica, size_bytes: int) -> CommandResult:
        """The replica itself ends a canary that takes too long, so that it can go on with other weights."""
        timeout_s = self.canary_timeout_s + self.command_timeout_s_per_gb * size_bytes / GB
        return await self.send(replica, Canary(timeout_s), size_bytes)

    async def load(self, replica: RegisteredReplica, payloads: Sequence[VersionPayload]) -> bool:
        """Loads the payloads one after the other; returns false if the replica failed, which is replaced then.

        Nothing is generated with full weights whose adapter follows.
        """
        for payload in payloads:
            for command in (Stage(payload), Swap(SwapOptions(), is_trial=payload is not payloads[-1])):
                error = error_of(await self.send(replica, command, payload.size_bytes))
                if error is not None:
                    self.replace_if_registered(replica, error, payload.version)
                    return False
        return True

    def replace(self, replica: RegisteredReplica, reason: str, version: int | None = None) -> None:
        """Ends the replica's actor, so that Serve starts another; `version` is the one that it should have loaded."""
        extra = {"replica_id": replica.replica_id, "version": version}
        logger.warning("A generator replica is replaced: %s", reason, extra=extra)
        self.registry.forget(replica.replica_id, reason)
        self.cluster.kill(replica.registration.actor)

    def replace_if_registered(self, replica: RegisteredReplica, reason: str, version: int | None = None) -> None:
        """Like `replace`, except that a replica which died, or which has registered again since, is left alone."""
        if self.registry.has(replica):
            self.replace(replica, reason, version)

    def outcome(
        self, replica: RegisteredReplica, last: CommandResult, version: int, staged: CommandReport | None = None
    ) -> ReplicaUpdate:
        """The outcome of an update to `version` for one replica; a replica that failed is replaced.

        Args:
            last: result of the last command that was sent to the replica.
            staged: the report of the `Stage` before it.
        """
        if isinstance(last, CommandReport) and last.error is None:
            costs = last.costs if staged is None else staged.costs + last.costs
            return ReplicaUpdate(replica_id=replica.replica_id, status="swapped", **asdict(costs))
        error = error_of(last)
        self.replace(replica, str(error), version)
        return ReplicaUpdate(replica_id=replica.replica_id, status="replaced", error=error)


def error_of(result: CommandResult) -> str | None:
    return str(result) if isinstance(result, ReplicaLost) else result.error
