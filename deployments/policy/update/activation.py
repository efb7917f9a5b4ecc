"""Loads the current version into a replica that has registered, and only then lets it accept requests.

Guarantees: a replica accepts requests only once it holds what every replica should hold, the adapters of named policies
included; replicas that start load at
the same time, and updates do not wait for them. One exception: a replica that updates have overtaken
`LOADS_BESIDE_UPDATES` times makes them wait for one load, so that it is not overtaken for ever.
"""

import logging

from deployments.policy.replicas.commands import AcceptRequests
from deployments.policy.replicas.fleet import Fleet, error_of
from deployments.policy.replicas.replica_registry import RegisteredReplica
from deployments.policy.update.update_lock import UpdateLock
from deployments.policy.updates.adapters_of_replicas import AdaptersOfReplicas
from deployments.policy.versions.payloads import Payloads
from deployments.policy.versions.version_history import PolicyVersions

LOADS_BESIDE_UPDATES = 3
logger = logging.getLogger("rollout_service.policy")


class ReplicaInitializer:
    def __init__(
        self,
        fleet: Fleet,
        versions: PolicyVersions,
        payloads: Payloads,
        update_lock: UpdateLock,
        adapters: AdaptersOfReplicas,
    ) -> None:
        self._fleet = fleet
        self._versions = versions
        self._payloads = payloads
        self._update_lock = update_lock
        self._adapters = adapters

    async def initialize(self, replica: RegisteredReplica) -> None:
        """Loads what the replica lacks; it is replaced if that fails. The replica's `is_starting` is true until then.

        If a trainer sent the current weights straight to the replicas, and they were not saved, the service does not
        have them, and the replica waits for the next version.
        """
        try:
            await self._load_and_join(replica)
        except Exception as error:
            extra = {"replica_id": replica.replica_id}
            logger.warning("The current weights could not be given to a replica.", exc_info=error, extra=extra)
            self._fleet.replace_if_registered(replica, str(error))

    async def _load_and_join(self, replica: RegisteredReplica) -> None:
        for _ in range(LOADS_BESIDE_UPDATES):
            if not await self._load_missing(replica):
                return
            async with self._update_lock.lease():
                if replica.loaded == self._versions.desired or not self._payloads.can_complete(replica.loaded):
                    await self._join(replica)
                    return
        async with self._update_lock.lease():
            if await self._load_missing(replica):
                await self._join(replica)

    async def _load_missing(self, replica: RegisteredReplica) -> bool:
        """Returns false if the replica failed."""
        desired = self._versions.desired
        replica.loading = (desired.full, desired.version)
        try:
            await self._payloads.make_files(replica.loaded)
            payloads = await self._payloads.missing(replica.loaded)
            return await self._fleet.load(replica, payloads)
        finally:
            replica.loading = ()

    async def _join(self, replica: RegisteredReplica) -> None:
        """From now on the replica takes part in updates. The caller holds the update lease."""
        replica.is_starting = False
        if replica.loaded != self._versions.desired:
            version = self._versions.desired.version
            extra = {"replica_id": replica.replica_id, "version": version}
            logger.warning("A replica waits: only engines have the weights of version %d.", version, extra=extra)
        await self.start_accepting()

    async def start_accepting(self) -> None:
        """Tells every replica that holds the desired weights, and was not told yet, to accept requests.

        The caller holds the update lease.
        """
        desired = self._versions.desired
        ready = [
            replica
            for replica in self._fleet.registry.started
            if not replica.accepts_requests and replica.loaded == desired
        ]
        for replica in ready:
            replica.accepts_requests = True
        await self._adapters.give([replica for replica in ready if self._adapters.are_needed_by(replica)])
        results = await self._fleet.send_all(ready, AcceptRequests())
        for replica, result in zip(ready, results, strict=True):
            if (error := error_of(result)) is not None:
                self._fleet.replace_if_registered(replica, error, desired.version)
