"""Replicas get the current version before they accept requests, and what follows once another one is current.

Guarantees: a replica accepts requests only once it holds what every replica should hold, the adapters of named policies
included; replicas that start load at the same time, and updates do not wait for them. One exception: a replica that
updates have overtaken `LOADS_BESIDE_UPDATES` times makes them wait for one load, so that it is not overtaken for ever.
Once a version is current, older ones are removed, and the store makes its full weights in the background where the
chain of deltas has become too long.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from deployments.policy.failures import PolicyFailure
from deployments.policy.policies import PolicyRegistry
from deployments.policy.policy import Policy
from deployments.policy.replicas.commands import AcceptRequests, SetAdapters
from deployments.policy.replicas.replica_registry import RegisteredReplica, ReplicaRegistry, error_of
from deployments.policy.update.payloads import Payloads
from deployments.policy.update.update_lock import UpdateLock
from deployments.policy.versions.housekeeping import Housekeeping
from deployments.policy.versions.version_history import VersionHistory
from deployments.rpc.background_tasks import BackgroundTasks

LARGEST_SHARE = 0.5
"""Largest share of the size of the full weights: more bytes of deltas behind them would save little disk."""
logger = logging.getLogger("rollout_service.policy")


class ChainCompaction:
    """Makes the full weights of the current version where too many deltas are behind it.

    Args:
        longest_chain: how many deltas may follow a file with full weights.
    """

    def __init__(self, versions: VersionHistory, tasks: BackgroundTasks, longest_chain: int) -> None:
        self._versions = versions
        self._tasks = tasks
        self._longest_chain = longest_chain
        self._is_running = False

    def start_if_due(self, then: Callable[[], None]) -> None:
        """Returns at once; `then` is called when older versions are of no use any more."""
        full = self._versions.desired.full
        if not self._is_running and self._is_due(full):
            self._is_running = True
            self._tasks.start(self._compact(full, then))

    def _is_due(self, version: int) -> bool:
        chains = self._versions.chains
        deltas = len(chains.links(version)) - 1
        if deltas < 1:
            return False
        full_bytes = self._versions.info(version).size_bytes
        return deltas > self._longest_chain or chains.bytes_behind(version) > LARGEST_SHARE * full_bytes

    async def _compact(self, version: int, then: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(self._versions.file, version)
        except (PolicyFailure, OSError) as error:
            extra = {"version": version}
            logger.error("The full weights of version %d could not be made.", version, exc_info=error, extra=extra)
        else:
            then()
        finally:
            self._is_running = False


LOADS_BESIDE_UPDATES = 3


class ReplicaInitializer:
    """Gives replicas that start what every replica should hold."""

    def __init__(
        self, policies: PolicyRegistry, registry: ReplicaRegistry, payloads: Payloads, update_lock: UpdateLock
    ) -> None:
        self._policies = policies
        self._versions = policies.unnamed.versions
        self._registry = registry
        self._payloads = payloads
        self._update_lock = update_lock

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
            self._registry.replace_if_registered(replica, str(error))

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
            await self._payloads.materialize(replica.loaded)
            payloads = await self._payloads.to_load(replica.loaded)
            return await self._registry.load(replica, payloads)
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
            replica for replica in self._registry.started if not replica.accepts_requests and replica.loaded == desired
        ]
        for replica in ready:
            replica.accepts_requests = True
        await self.set_adapters([replica for replica in ready if self._needs_adapters(replica)])
        results = await self._registry.send_all(ready, AcceptRequests())
        for replica, result in zip(ready, results, strict=True):
            if (error := error_of(result)) is not None:
                self._registry.replace_if_registered(replica, error, desired.version)

    async def restore_adapters(self, replica: RegisteredReplica) -> None:
        """Lets a replica whose full weights were loaded again serve the named policies. The caller holds the lease."""
        if self._needs_adapters(replica):
            await self.set_adapters([replica])

    def _needs_adapters(self, replica: RegisteredReplica) -> bool:
        """Whether the replica has to be told which named policies it serves."""
        return bool(replica.registration.named) or any(policy.served for policy in self._policies.named.values())

    async def set_adapters(self, replicas: Sequence[RegisteredReplica]) -> None:
        """Lets the replicas serve exactly the named policies that are current; one that cannot is replaced.

        The caller holds the update lease.
        """
        payloads = await asyncio.to_thread(self._payloads.adapters)
        command = SetAdapters(payloads, self._registry.canary_timeout_s())
        results = await self._registry.send_all(replicas, command, sum(payload.size_bytes for payload in payloads))
        for replica, result in zip(replicas, results, strict=True):
            if (error := error_of(result)) is not None:
                self._registry.replace_if_registered(replica, error)


class VersionActivation:
    """Follows a change of the version that is current on disk."""

    def __init__(
        self,
        policies: PolicyRegistry,
        payloads: Payloads,
        initializer: ReplicaInitializer,
        housekeeping: Housekeeping,
        compaction: ChainCompaction,
    ) -> None:
        self._policies = policies
        self._payloads = payloads
        self._initializer = initializer
        self._housekeeping = housekeeping
        self._compaction = compaction

    async def activate(self, policy: Policy) -> None:
        """Publishes the version, removes what it makes useless, and lets replicas that waited for it accept requests.

        The caller holds the update lease.
        """
        current = await policy.publish()
        logger.info("Version %s is current.", policy.label(current), extra=policy.log_extra(current))
        await self._policies.publish(policy)
        self.remove_old_versions(policy)
        if policy.name is None:
            await self._initializer.start_accepting()
            self._compaction.start_if_due(then=lambda: self.remove_old_versions(policy))

    def remove_old_versions(self, policy: Policy) -> None:
        policy.remove_old_versions(self._payloads.pinned)
        self._housekeeping.wake()
