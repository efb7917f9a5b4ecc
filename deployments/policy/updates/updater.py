"""Makes a validated version current, one update at a time.

Guarantees: two updates never mix; a version is current on disk before any replica serves it, and is published once the
replicas have loaded it; if an update fails before its version is current on disk, everything is as it was.
"""

from pathlib import Path

from deployments.policy.replicas.commands import SwapOptions
from deployments.policy.replicas.fleet import Fleet
from deployments.policy.replicas.replica_registry import RegisteredReplica
from deployments.policy.updates.activation import VersionActivation
from deployments.policy.updates.two_phase_update import update_replicas
from deployments.policy.updates.update_lock import UpdateLock
from deployments.policy.versions.payloads import Payloads
from deployments.policy.versions.version_history import PolicyVersions
from deployments.policy.versions.version_store import StoredVersion
from rollout_client.policy_contract import PolicyUpdate, PushOptions, ReplicaUpdate


class Updater:
    def __init__(
        self,
        fleet: Fleet,
        versions: PolicyVersions,
        payloads: Payloads,
        activation: VersionActivation,
        update_lock: UpdateLock,
    ) -> None:
        self._fleet = fleet
        self._versions = versions
        self._payloads = payloads
        self._activation = activation
        self._update_lock = update_lock

    def refuse(self, version: int, options: PushOptions) -> None:
        """Raises what `update` would raise at once, for callers that have to prepare the version first."""
        self._versions.refuse_taken(version)
        self._update_lock.refuse_if_busy(options)

    async def update(self, info: StoredVersion, weights: Path, options: PushOptions) -> PolicyUpdate:
        """Waits for the update lease, then loads the version into every replica.

        Args:
            info: of an adapter, `base` is filled in here: the full weights that are current then.
            weights: a file on the file system of the version store, which is moved.

        Raises:
            UpdateUnderWay: another update holds the lease, and the caller does not wait.
            VersionRefused: another update has taken the number meanwhile, or a higher one.
            WeightsRefused: no engine could load the weights.
        """
        self.refuse(info.version, options)
        async with self._update_lock.lease(f"version {info.version} is being loaded by the replicas"):
            # Once the version is listed, a replica that dies is part of the update, and its outcome says so.
            await self._fleet.registry.forget_the_dead()
            if info.kind == "adapter":
                info = info.model_copy(update={"base": self._versions.desired.full})
            async with self._versions.adding(info, weights):
                try:
                    replicas = await self._update_replicas(info, options)
                finally:
                    if self._versions.desired.version == info.version:
                        await self._activation.activate()
        return PolicyUpdate(version=info.version, checksum=info.checksum, replicas=replicas)

    async def _update_replicas(self, info: StoredVersion, options: PushOptions) -> list[ReplicaUpdate]:
        return await update_replicas(
            self._fleet,
            self._replicas_for(info),
            await self._payloads.payload(info.version),
            SwapOptions(options.mode, options.reset_prefix_cache),
            lambda: self._versions.make_current(info.version),
        )

    def _replicas_for(self, info: StoredVersion) -> list[RegisteredReplica]:
        """The replicas that have started; of an adapter only those that hold its base.

        The others load the version before they accept requests.
        """
        replicas = self._fleet.registry.started
        if info.kind != "adapter":
            return replicas
        return [replica for replica in replicas if replica.loaded.full == info.base]
