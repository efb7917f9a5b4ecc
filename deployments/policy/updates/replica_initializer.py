"""Loads the current version into a replica that has registered, and only then lets it accept requests."""

import asyncio
import logging

from deployments.policy.replicas.commands import AcceptRequests
from deployments.policy.replicas.fleet import Fleet, error_of
from deployments.policy.replicas.replica_registry import RegisteredReplica
from deployments.policy.updates.update_lock import UpdateLock
from deployments.policy.versions.payloads import Payloads
from deployments.policy.versions.version_history import PolicyVersions

logger = logging.getLogger("rollout_service.policy")


class ReplicaInitializer:
    def __init__(self, fleet: Fleet, versions: PolicyVersions, payloads: Payloads, update_lock: UpdateLock) -> None:
        self._fleet = fleet
        self._versions = versions
        self._payloads = payloads
        self._update_lock = update_lock

    async def initialize(self, replica: RegisteredReplica) -> None:
        """Loads what the replica lacks; it is replaced if that fails.

        If a trainer sent the current weights straight to the replicas, the service does not have them, and the replica
        waits for the next version.
        """
        async with self._update_lock.lease():
            try:
                payloads = await asyncio.to_thread(self._payloads.missing, replica.loaded)
                if payloads is not None and await self._fleet.load(replica, payloads):
                    await self.start_accepting()
            except Exception as error:
                extra = {"replica_id": replica.replica_id}
                logger.warning("The current weights could not be given to a replica.", exc_info=error, extra=extra)
                self._fleet.replace_if_registered(replica, str(error))

    async def start_accepting(self) -> None:
        """Tells every replica that holds the desired weights, and was not told yet, to accept requests.

        The caller holds the update lease.
        """
        desired = self._versions.desired
        ready = [
            replica
            for replica in self._fleet.registry.replicas
            if not replica.accepts_requests and replica.loaded == desired
        ]
        for replica in ready:
            replica.accepts_requests = True
        results = await self._fleet.send_all(ready, AcceptRequests())
        for replica, result in zip(ready, results, strict=True):
            if (error := error_of(result)) is not None:
                self._fleet.replace_if_registered(replica, error, desired.version)
