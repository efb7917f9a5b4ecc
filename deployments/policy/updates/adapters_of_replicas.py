"""What updates need of named policies, which are served beside the full weights. `ReplicaAdapters` implements it."""

from collections.abc import Sequence
from typing import Protocol

from deployments.policy.replicas.replica_registry import RegisteredReplica


class AdaptersOfReplicas(Protocol):
    def are_needed_by(self, replica: RegisteredReplica) -> bool:
        """Whether a replica that starts has to be told what it serves."""
        ...

    async def give(self, replicas: Sequence[RegisteredReplica]) -> None:
        """Lets them serve exactly what is current; one that cannot is replaced. The caller holds the update lease."""
        ...
