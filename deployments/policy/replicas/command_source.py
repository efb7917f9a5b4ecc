"""The policy store as a generator replica calls it: the replica registers, and then polls for commands.

`PolicyStore` and, over its Serve handle, `PolicyStoreClient` implement it.
"""

from typing import Protocol

from deployments.policy.replicas.commands import CommandReport, LoadedWeights, NumberedCommand, ReplicaRegistration


class ReplicaNotRegistered(Exception):
    """The store does not know the replica, or does not know it any more: it has to register (again)."""


class CommandSource(Protocol):
    """Every call raises `PolicyStoreLost` if the store cannot be reached."""

    async def register(self, registration: ReplicaRegistration) -> None:
        """Adds the replica; a replica of the same id that was registered before is forgotten with its commands."""
        ...

    async def next_command(self, replica_id: str, report: CommandReport | None) -> NumberedCommand | None:
        """Reports on the previous command and waits for the next one; `None` if none was given for a while.

        Raises:
            ReplicaNotRegistered: the replica has to register first.
        """
        ...

    async def record_checksum(self, replica_id: str, loaded: LoadedWeights, checksum: str) -> None:
        """Tells the checksum that `ComputeChecksum` asked for; ignored if the replica has changed its weights since.

        Raises:
            ReplicaNotRegistered: the replica has to register first.
        """
        ...
