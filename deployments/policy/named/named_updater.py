"""Makes a validated adapter the current version of a named policy. Nothing is paused.

Guarantees: one replica loads the adapter and generates with it before it is current on disk, and before any rollout
uses it; if that replica cannot, the version is refused and nothing has changed; afterwards a replica that cannot is
replaced; the adapter is one for the full weights that every replica has, because no other update runs meanwhile.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from deployments.policy.failures import WeightsRefused
from deployments.policy.named.replica_adapters import ReplicaAdapters
from deployments.policy.replicas.commands import CommandReport, SetAdapters
from deployments.policy.replicas.fleet import CommandResult, Fleet, error_of
from deployments.policy.replicas.replica_registry import RegisteredReplica
from deployments.policy.update.update_lock import UpdateLock
from deployments.policy.updates.trial_results import adapter_warnings, all_were_lost, must_be_replaced, was_lost
from deployments.policy.updates.updates import Updates
from deployments.policy.versions.version_history import PolicyVersions
from deployments.policy.versions.version_store import StoredVersion
from rollout_client.policy_contract import PolicyUpdate, PushOptions, ReplicaUpdate
from rollout_client.policy_names import label_of
from rollout_client.problem_contract import FieldProblem

logger = logging.getLogger("rollout_service.policy")


class NamedUpdater(Updates):
    """
    Args:
        versions: those of the named policy.
        base: the versions of the full weights.
        adapters: what the replicas serve of all named policies.
        publish: tells everyone of the version that is current on disk.
    """

    def __init__(
        self,
        name: str,
        fleet: Fleet,
        versions: PolicyVersions,
        base: PolicyVersions,
        adapters: ReplicaAdapters,
        update_lock: UpdateLock,
        publish: Callable[[], Awaitable[None]],
    ) -> None:
        self._name = name
        self._fleet = fleet
        self._versions = versions
        self._base = base
        self._adapters = adapters
        self._update_lock = update_lock
        self._publish = publish

    def refuse(self, version: int, options: PushOptions) -> None:
        self._versions.refuse_taken(version)
        self._update_lock.refuse_if_busy(options)

    async def update(self, info: StoredVersion, file: Path, options: PushOptions) -> PolicyUpdate:
        """Waits for the update lease, then loads the adapter into every replica.

        Args:
            info: `base` is filled in here: the full weights that are current then.
            file: the adapter, on the file system of the version store.

        Raises:
            UpdateUnderWay, PolicyNotCurrent, VersionRefused: as `Updater.update` does.
            WeightsRefused: the replica that tried the adapter cannot load it or cannot generate with it.
            VersionUntried: every replica was lost before it had tried the adapter.
        """
        self.refuse(info.version, options)
        label = label_of(self._name, info.version)
        async with self._update_lock.lease(f"version {label} is being loaded by the replicas"):
            await self._fleet.registry.forget_the_dead()
            await asyncio.to_thread(self._base.refuse_other_base, options)
            warnings = list(self._base.warnings_of_base(self._versions.last_adapter_base, options))
            info = info.model_copy(update={"base": self._base.desired.full})
            async with self._versions.adding(info, file):
                try:
                    replicas = await self._update_replicas(info, warnings)
                finally:
                    if self._versions.current_on_disk == info.version:
                        self._versions.last_adapter_base = self._base.full_weights
                        await self._publish()
                        logger.info("Version %s is current.", label, extra={"version": label})
        return PolicyUpdate(
            version=info.version,
            name=self._name,
            checksum=info.checksum,
            replicas=replicas,
            base=info.base,
            warnings=warnings,
        )

    async def _update_replicas(self, info: StoredVersion, warnings: list[str]) -> list[ReplicaUpdate]:
        replicas = [each for each in self._fleet.registry.started if each.loaded.full == info.base]
        command = await asyncio.to_thread(self._adapters.command, self._name, info)
        results: dict[RegisteredReplica, CommandResult] = {}
        loaded = await self._try(command, replicas, results)
        warnings += adapter_warnings(None if loaded is None else results[loaded])
        self._versions.make_current(info.version)
        others = [replica for replica in replicas if replica not in results]
        first = [] if loaded is None else [loaded]
        sent = await self._fleet.send_all([*first, *others], command, info.size_bytes)
        tried = results.copy()
        results |= dict(zip([*first, *others], sent, strict=True))
        return [
            self._fleet.outcome(replica, results[replica], info.version, report_of(tried, replica))
            for replica in replicas
        ]

    async def _try(
        self,
        command: SetAdapters,
        replicas: Sequence[RegisteredReplica],
        results: dict[RegisteredReplica, CommandResult],
    ) -> RegisteredReplica | None:
        """Lets one replica after the other try the adapter, until one is not lost meanwhile; notes their `results`.

        Returns the one that can generate with it; `None` without replicas.

        Raises:
            WeightsRefused: a replica cannot generate with it. It goes on without, or is replaced.
            VersionUntried: all were lost meanwhile.
        """
        trial = SetAdapters(command.payloads, command.canary_timeout_s, is_trial=True)
        for replica in replicas:
            result = results[replica] = await self._adapters.send(replica, trial)
            error = error_of(result)
            if error is None:
                return replica
            if was_lost(result):
                continue
            if must_be_replaced(result):
                self._fleet.replace_if_registered(replica, error)
            message = f"a replica could not load them or generate with them: {error}"
            raise WeightsRefused(FieldProblem(field="weights", message=message))
        if replicas:
            raise all_were_lost(results.values())
        return None


def report_of(tried: dict[RegisteredReplica, CommandResult], replica: RegisteredReplica) -> CommandReport | None:
    """The report of the trial, if the replica made one and was not lost in it."""
    result = tried.get(replica)
    return result if isinstance(result, CommandReport) else None
