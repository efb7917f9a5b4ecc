"""The registered generator replicas together: sending them commands, and replacing those that fail."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.policy.cluster import Cluster
from deployments.policy.replicas.commands import Command, CommandReport, Stage, Swap, SwapOptions, VersionPayload
from deployments.policy.replicas.replica_registry import RegisteredReplica, ReplicaLost, ReplicaRegistry
from rollout_client.policy_contract import ReplicaUpdate

logger = logging.getLogger("rollout_service.policy")
CommandResult = CommandReport | ReplicaLost


@dataclass(frozen=True, slots=True)
class Fleet:
    """
    Args:
        command_timeout_s: a replica that takes longer for one command counts as lost.
    """

    registry: ReplicaRegistry
    cluster: Cluster
    command_timeout_s: float

    async def send_all(self, replicas: Sequence[RegisteredReplica], command: Command) -> list[CommandResult]:
        """Sends one command to all of them and waits for all results, in the same order."""
        return await asyncio.gather(*(self.send(replica, command) for replica in replicas))

    async def send(self, replica: RegisteredReplica, command: Command) -> CommandResult:
        try:
            return await self.registry.send(replica, command, self.command_timeout_s)
        except ReplicaLost as lost:
            return lost

    async def load(self, replica: RegisteredReplica, payloads: Sequence[VersionPayload]) -> bool:
        """Loads the payloads one after the other; returns false if the replica failed, which is replaced then."""
        for payload in payloads:
            for command in (Stage(payload), Swap(SwapOptions())):
                error = error_of(await self.send(replica, command))
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
            return ReplicaUpdate(
                replica_id=replica.replica_id,
                status="swapped",
                load_s=0.0 if staged is None else staged.load_s,
                fetched_bytes=0 if staged is None else staged.fetched_bytes,
                swap_s=last.swap_s,
                pause_s=last.pause_s,
            )
        error = error_of(last)
        self.replace(replica, str(error), version)
        return ReplicaUpdate(replica_id=replica.replica_id, status="replaced", error=error)


def error_of(result: CommandResult) -> str | None:
    return str(result) if isinstance(result, ReplicaLost) else result.error
