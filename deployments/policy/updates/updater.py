"""Makes a validated version current, one update at a time.

Guarantees: two updates never mix; a version is current on disk only after a replica has generated with it, if there is
one, and before any rollout does; it is published once the replicas have loaded it; if an update fails before its
version is current on disk, everything is as it was. That the full weights of a delta have the checksum that its sender
says is found out before that: by the nodes, which make them, or without replicas by the store.
"""

import asyncio
from pathlib import Path

from deployments.policy.failures import WeightsRefused
from deployments.policy.replicas.commands import SwapOptions
from deployments.policy.replicas.fleet import Fleet
from deployments.policy.replicas.replica_registry import RegisteredReplica
from deployments.policy.update.two_phase_update import VersionUpdate, update_replicas
from deployments.policy.update.update_lock import UpdateLock
from deployments.policy.updates.activation import VersionActivation
from deployments.policy.updates.adapters_of_replicas import AdaptersOfReplicas
from deployments.policy.updates.trial_results import UNSEEN_ADAPTER
from deployments.policy.updates.updates import Updates
from deployments.policy.versions.payloads import Payloads
from deployments.policy.versions.version_history import PolicyVersions
from deployments.policy.versions.version_store import StoredVersion
from deployments.policy.versions.weight_checks import changed_values
from rollout_client.policy_contract import PolicyUpdate, PushOptions, ReplicaUpdate
from rollout_client.problem_contract import FieldProblem

UNSEEN = "The weights change no log-probability of the canary"
SEEN_SHARE = 0.001
"""Of the values that every text is computed with. Where more have changed, some log-probability changes even if each
changed by its last bit alone."""


class Updater(Updates):
    def __init__(
        self,
        fleet: Fleet,
        versions: PolicyVersions,
        payloads: Payloads,
        activation: VersionActivation,
        update_lock: UpdateLock,
        adapters: AdaptersOfReplicas,
    ) -> None:
        self._fleet = fleet
        self._versions = versions
        self._payloads = payloads
        self._activation = activation
        self._update_lock = update_lock
        self._adapters = adapters

    def refuse(self, version: int, options: PushOptions) -> None:
        self._versions.refuse_taken(version)
        self._update_lock.refuse_if_busy(options)

    async def update(self, info: StoredVersion, file: Path, options: PushOptions) -> PolicyUpdate:
        """Waits for the update lease, then loads the version into every replica.

        Args:
            info: of an adapter, `base` is filled in here: the full weights that are current then.
            file: the weights, or a delta, on the file system of the version store.

        Raises:
            UpdateUnderWay: another update holds the lease, and the caller does not wait.
            PolicyNotCurrent: an adapter was trained on other full weights than the current ones.
            VersionRefused: another update has taken the number meanwhile, or a higher one.
            WeightsRefused: no engine could load the weights, or the one that tried them cannot generate with them.
            VersionUntried: every replica was lost before it had tried them.
        """
        self.refuse(info.version, options)
        async with self._update_lock.lease(f"version {info.version} is being loaded by the replicas"):
            # Once the version is listed, a replica that dies is part of the update, and its outcome says so.
            await self._fleet.registry.forget_the_dead()
            warnings: list[str] = []
            if info.kind == "adapter":
                await asyncio.to_thread(self._versions.refuse_other_base, options)
                warnings += self._versions.warnings_of_base(self._versions.last_adapter_base, options)
                info = info.model_copy(update={"base": self._versions.desired.full})
            else:
                info = info.model_copy(update={"keeps_prefix_cache": not options.reset_prefix_cache})
            async with self._versions.adding(info, file):
                try:
                    replicas = await self._update_replicas(info, options, warnings)
                finally:
                    if self._versions.desired.version == info.version:
                        if info.kind == "adapter":
                            self._versions.last_adapter_base = self._versions.full_weights
                        await self._activation.activate()
        canary_s = max((replica.canary_s for replica in replicas), default=0.0)
        return PolicyUpdate(
            version=info.version,
            checksum=info.checksum,
            replicas=replicas,
            canary_s=canary_s,
            keeps_prefix_cache=info.keeps_prefix_cache,
            base=info.base if info.kind == "adapter" else None,
            warnings=warnings,
        )

    async def _update_replicas(
        self, info: StoredVersion, options: PushOptions, warnings: list[str]
    ) -> list[ReplicaUpdate]:
        replicas = self._replicas_for(info)
        if not replicas or info.base != self._versions.desired.full:
            # No node applies the delta: whether it makes what its sender says is found out here.
            await asyncio.to_thread(self._versions.file, info.version)
        update = VersionUpdate(
            self._fleet,
            await self._payloads.payload(info.version, held=self._versions.desired.full),
            SwapOptions(options.mode, options.reset_prefix_cache),
            lambda: self._versions.make_current(info.version),
            self._load_current,
            lambda: self._judge_unchanged(info, warnings),
        )
        return await update_replicas(update, replicas)

    async def _judge_unchanged(self, info: StoredVersion, warnings: list[str]) -> None:
        """Judges a version that changes no log-probability of the canary: it may be a very small change, or none.

        Raises:
            WeightsRefused: so many values differ from those before that the engine cannot have taken them.
        """
        if info.kind == "adapter":
            warnings.append(UNSEEN_ADAPTER)
            return
        before = self._versions.desired.full
        if not self._versions.has_weights(before):
            warnings.append(f"{UNSEEN}; how many values differ from version {before} is not known.")
            return
        old, new = await asyncio.to_thread(lambda: [*map(self._versions.file, (before, info.version))])
        values = await asyncio.to_thread(changed_values, old, new)
        if not values.changed:
            return
        finding = f"{UNSEEN}, and {values.changed} of {values.total} values differ from version {before}"
        if values.share_of_all_texts >= SEEN_SHARE:
            message = f"{finding}: the engine does not generate with them"
            raise WeightsRefused(FieldProblem(field="weights", message=message))
        warnings.append(f"{finding}.")

    async def _load_current(self, replica: RegisteredReplica) -> None:
        """Lets a replica that holds a version on trial go back to what is current. It is replaced if that fails.

        That is so too if only other replicas have the current weights: a trainer sent them there.
        """
        if self._payloads.can_complete(replica.loaded):
            await self._fleet.load(replica, await self._payloads.missing(replica.loaded))
            if self._adapters.are_needed_by(replica):
                # The trial took them off.
                await self._adapters.give([replica])
        else:
            self._fleet.replace_if_registered(replica, "the weights before the trial came from a trainer's memory")

    def _replicas_for(self, info: StoredVersion) -> list[RegisteredReplica]:
        """The replicas that have started; of an adapter only those that hold its base.

        The others load the version before they accept requests.
        """
        replicas = self._fleet.registry.started
        if info.kind != "adapter":
            return replicas
        return [replica for replica in replicas if replica.loaded.full == info.base]
