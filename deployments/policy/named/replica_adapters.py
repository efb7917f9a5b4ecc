"""What every replica serves beside its full weights: the current version of each named policy."""

import asyncio
from collections.abc import Mapping, Sequence

from deployments.policy.policy import NamedPolicy
from deployments.policy.replicas.commands import SetAdapters
from deployments.policy.replicas.fleet import CommandResult, Fleet, error_of
from deployments.policy.replicas.replica_registry import RegisteredReplica
from deployments.policy.updates.adapters_of_replicas import AdaptersOfReplicas
from deployments.policy.versions.version_store import StoredVersion


class ReplicaAdapters(AdaptersOfReplicas):
    """
    Args:
        policies: by name. All that were ever pushed; those without a version are not served.
        node_id: of the policy store's node.
        copy_to_nodes: other nodes fetch a file even if they can read the folder of the store.
    """

    def __init__(
        self, fleet: Fleet, policies: Mapping[str, NamedPolicy], node_id: str, copy_to_nodes: bool = False
    ) -> None:
        self._fleet = fleet
        self._policies = policies
        self._node_id = node_id
        self._copy_to_nodes = copy_to_nodes

    def are_needed_by(self, replica: RegisteredReplica) -> bool:
        return bool(replica.registration.named) or any(policy.served for policy in self._policies.values())

    def command(self, name: str | None = None, instead: StoredVersion | None = None) -> SetAdapters:
        """What makes a replica serve exactly what is current. Call it from a thread.

        Args:
            name, instead: of this policy not the current version, but this one.
        """
        served = {each.name: each.served for each in self._policies.values()}
        if name is not None:
            served[name] = instead
        payloads = [
            self._policies[each].payload(info, self._node_id, self._copy_to_nodes)
            for each, info in sorted(served.items())
            if info is not None
        ]
        return SetAdapters(tuple(payloads), self._fleet.canary_timeout_s)

    async def send(self, replica: RegisteredReplica, command: SetAdapters) -> CommandResult:
        return await self._fleet.send(replica, command, sum(payload.size_bytes for payload in command.payloads))

    async def give(self, replicas: Sequence[RegisteredReplica]) -> None:
        command = await asyncio.to_thread(self.command)
        results = await asyncio.gather(*(self.send(replica, command) for replica in replicas))
        for replica, result in zip(replicas, results, strict=True):
            if (error := error_of(result)) is not None:
                self._fleet.replace_if_registered(replica, error)
