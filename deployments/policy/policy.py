"""One named policy: adapters served beside the full weights, their versions on disk, and their update.

    names/run-b/current.json       the newest version that was served; the policy may have been dropped since
    names/run-b/versions/7/        as in `VersionStore`
    names/run-b/uploads/           as in `UploadStore`

An update pauses nothing. Guarantees: the versions of a policy are numbered upward for ever, also where the policy was
dropped in between; one replica loads the adapter and generates with it before it is current on disk, and before any
rollout uses it; if that replica cannot, the version is refused and nothing has changed; afterwards a replica that
cannot is replaced; the adapter is one for the full weights that every replica has, because no other update runs
meanwhile.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deployments.policy.failures import WeightsRefused
from deployments.policy.replicas.commands import CommandReport, SetAdapters, VersionPayload
from deployments.policy.replicas.replica_registry import CommandResult, Fleet, RegisteredReplica, error_of
from deployments.policy.update.activation import AdaptersOfReplicas
from deployments.policy.update.two_phase_update import adapter_warnings, all_were_lost, must_be_replaced, was_lost
from deployments.policy.update.update_lock import UpdateLock
from deployments.policy.uploads.pushes import Pushes, Updates
from deployments.policy.uploads.upload_store import UploadStore
from deployments.policy.uploads.uploads import Uploads
from deployments.policy.versions.current_version import CurrentVersion
from deployments.policy.versions.payloads import stored_file
from deployments.policy.versions.version_history import VersionHistory
from deployments.policy.versions.version_store import StoredVersion, VersionStore
from rollout_client.contract.base import label_of
from rollout_client.contract.policy import NamedPolicyState, PolicyUpdate, PushOptions, ReplicaUpdate


@dataclass(slots=True, eq=False)
class NamedPolicy:
    name: str
    version_store: VersionStore
    upload_store: UploadStore
    current: CurrentVersion
    versions: VersionHistory
    uploads: Uploads
    pushes: Pushes
    served: StoredVersion | None = field(init=False)
    """The version that new generations use; `None` if there is none."""

    def __post_init__(self) -> None:
        self.served = self.versions.stored(self.current.number)

    @property
    def is_known(self) -> bool:
        """Whether anybody has ever begun to push it."""
        return bool(self.current.number or self.upload_store.states())

    async def publish(self) -> None:
        """The version that is current on disk is served from now on, and older ones are removed."""
        number = await self.versions.publish()
        self.version_store.keep_only([number])
        self.uploads.drop_up_to(number)
        self.served = self.versions.stored(number)

    def drop(self) -> None:
        """It has no version any more. The number of the last one stays known."""
        self.version_store.keep_only(())
        self.served = None

    def weights_of(self, info: StoredVersion) -> Path:
        return self.version_store.weights(info.version)

    def payload(self, info: StoredVersion, node_id: str, is_copied: bool) -> VersionPayload:
        """Of one of its versions, for replicas. Args: as in `StoredFile`."""
        return VersionPayload(
            version=info.version,
            kind="adapter",
            size_bytes=info.size_bytes,
            checksum=str(info.checksum),
            file=stored_file(self.weights_of(info), node_id, is_copied),
            adapter_config=info.adapter_config,
            name=self.name,
            base=info.base,
        )

    def state(self) -> NamedPolicyState:
        served = self.served
        return NamedPolicyState(
            name=self.name,
            current=None if served is None else served.version,
            base=None if served is None else served.base,
            checksum=None if served is None else served.checksum,
            size_bytes=0 if served is None else served.size_bytes,
            created_at=None if served is None else served.created_at,
            next_version=self.pushes.next_number(),
            updating_to=self.versions.updating_to,
            uploads=self.uploads.states(),
        )


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
        versions: VersionHistory,
        base: VersionHistory,
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
            raise WeightsRefused.of("weights", message)
        if replicas:
            raise all_were_lost(results.values())
        return None


def report_of(tried: dict[RegisteredReplica, CommandResult], replica: RegisteredReplica) -> CommandReport | None:
    """The report of the trial, if the replica made one and was not lost in it."""
    result = tried.get(replica)
    return result if isinstance(result, CommandReport) else None
