"""The policy store, one for the service: the Serve deployment that `rpc/store_client.py` calls.

Guarantees: the current version is on disk before any replica serves it; the bytes of a version never change; two
updates never mix; a store that dies restarts from its last durable state.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from deployments import logs
from deployments.policy.cluster import Cluster, RayCluster, cluster_weights_folder, warn_unless_shared
from deployments.policy.named_policies import NamedPolicyRegistry, StoreParts, named_policies_of
from deployments.policy.replicas.commands import (
    CommandReport,
    CommandSource,
    LoadedWeights,
    NumberedCommand,
    ReplicaRegistration,
)
from deployments.policy.replicas.file_fetch import WeightsSource, read_range
from deployments.policy.replicas.replica_registry import Fleet, ReplicaRegistry
from deployments.policy.settings import PolicySettings
from deployments.policy.transfer.completion import TransferReload, TransferSaving
from deployments.policy.transfer.trusted_trainers import TrustedTrainers
from deployments.policy.transfer.weight_transfer import WeightTransfer, world_size
from deployments.policy.update.activation import ChainCompaction, ReplicaInitializer, VersionActivation
from deployments.policy.update.recovery import SETTLE_S, Recovery, Reseeding
from deployments.policy.update.two_phase_update import Updater
from deployments.policy.update.update_lock import UpdateLock
from deployments.policy.uploads.preparation import VersionPreparation
from deployments.policy.uploads.pushes import Pushes
from deployments.policy.uploads.upload_store import UploadStore
from deployments.policy.uploads.uploads import ActivePushes, Uploads
from deployments.policy.versions.current_version import CurrentVersion, NamedVersions
from deployments.policy.versions.full_weights import InitialVersion
from deployments.policy.versions.housekeeping import Housekeeping
from deployments.policy.versions.payloads import Payloads
from deployments.policy.versions.run_identity import RunIdentity
from deployments.policy.versions.version_history import VersionHistory
from deployments.policy.versions.version_store import VersionStore
from deployments.policy.weight_sources import generator_source
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.policy import (
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    PushOptions,
    ReplicaPolicy,
    SwitchOptions,
    UploadState,
)


async def policy_state(
    current: CurrentVersion,
    versions: VersionHistory,
    uploads: Uploads,
    registry: ReplicaRegistry,
    named: NamedPolicyRegistry,
    next_number: Callable[[], int],
    checksums_within_s: float,
) -> PolicyState:
    """Has replicas compute their checksums and waits at most `checksums_within_s` for them; with 0 none is asked.

    Args:
        next_number: says which number the next version may have.
    """
    await registry.forget_the_dead()
    await registry.ask_for_checksums(checksums_within_s)
    replicas = registry.replicas
    return PolicyState(
        current=current.number,
        updating_to=versions.updating_to,
        versions=versions.list(),
        replicas=[
            ReplicaPolicy(
                replica_id=replica.replica_id,
                version=replica.loaded.version,
                checksum=replica.checksum,
                accepts_requests=replica.accepts_requests,
            )
            for replica in replicas
        ],
        transfer_world_size=world_size([replica.registration.workers for replica in registry.started]),
        next_version=next_number(),
        uploads=uploads.states(),
        named=named.states(),
    )


class PushedPolicy(NamedTuple):
    """What calls of a push are about: the policy without a name, or a named one."""

    uploads: Uploads
    pushes: Pushes


class PolicyStore(CommandSource):
    """
    Args:
        model: folder or hub name of the checkpoint that engines start with, version 0.
        revision: of a model of the hub.
        max_lora_rank: as in `PolicyLayout`.
        source_of: where the files of a replica's node are read, by the replica's id.
        settle_s: as in `Recovery`.

    Raises:
        FolderRefused: the configured folder holds versions of another model or run.
    """

    def __init__(
        self,
        settings: PolicySettings,
        model: str,
        revision: str | None = None,
        cluster: Cluster | None = None,
        source_of: Callable[[str], WeightsSource] = generator_source,
        settle_s: float = SETTLE_S,
        max_lora_rank: int | None = None,
    ) -> None:
        logs.configure()
        cluster = RayCluster() if cluster is None else cluster
        folder = Path(settings.folder).expanduser() if settings.folder else cluster_weights_folder() / "policy"
        version_store, upload_store = VersionStore(folder), UploadStore(folder, settings.upload_expiry_s)
        run = RunIdentity(settings.run, model, revision).claim(version_store)
        version_store.remove_unfinished()
        upload_store.remove_unfinished(version_store.current())
        self._tasks = BackgroundTasks()
        self._registry = ReplicaRegistry(cluster.is_alive)
        fleet = Fleet(
            self._registry,
            cluster,
            settings.command_timeout_s,
            settings.command_timeout_s_per_gb,
            settings.canary_timeout_s,
        )
        self._update_lock = UpdateLock()

        self._initial = InitialVersion(model, version_store.weights(0), max_lora_rank)
        self._current = CurrentVersion(version_store.current(), settings.wait_s)
        self._versions = VersionHistory(version_store, self._initial, self._current, settings.max_version_step, run)
        self._payloads = Payloads(self._versions, self._registry, cluster.node_id(), settings.copy_to_nodes)
        self._active_pushes = ActivePushes(self._tasks)
        housekeeping = Housekeeping(version_store.trash)
        parts = StoreParts(
            folder,
            settings,
            run,
            cluster.node_id(),
            fleet,
            self._versions,
            self._initial,
            self._update_lock,
            self._tasks,
            housekeeping,
            lambda: sum(upload_store.bytes_on_disk().values()),
        )
        self._named, adapters = named_policies_of(parts)
        self._initializer = ReplicaInitializer(fleet, self._versions, self._payloads, self._update_lock, adapters)
        self._uploads = Uploads(
            upload_store,
            self._versions,
            self._initial,
            self._active_pushes,
            self._tasks,
            housekeeping,
            settings.upload_quota_bytes,
            lambda: self._named.upload_bytes,
        )
        compaction = ChainCompaction(self._versions, self._tasks, settings.longest_delta_chain)
        activation = VersionActivation(
            self._versions,
            self._uploads,
            self._initializer,
            self._payloads,
            housekeeping,
            compaction,
            settings.keep_versions,
            self._named.base_changed,
        )
        updater = Updater(fleet, self._versions, self._payloads, activation, self._update_lock, adapters)
        preparation = VersionPreparation(self._versions, self._initial, version_store, settings.checkpoint_roots)
        self._pushes = Pushes(self._active_pushes, self._uploads, preparation, self._versions, updater, housekeeping)
        reseeding = Reseeding(self._registry, self._versions, version_store, source_of, cluster.node_id())
        self._recovery = Recovery(
            fleet, self._versions, activation, self._initializer, self._update_lock, reseeding, self._tasks, settle_s
        )
        saving = TransferSaving(
            fleet, self._initial, reseeding, activation, self._recovery, self._tasks, settings.transfer.save_weights
        )
        trainers = TrustedTrainers(settings.transfer.trainers)
        self._transfer = WeightTransfer(
            fleet,
            self._versions,
            activation,
            self._update_lock,
            trainers,
            TransferReload(fleet, self._versions, self._payloads, settings.transfer_idle_s, adapters),
            saving,
            self._tasks,
            settings.transfer.rendezvous_timeout_s,
            settings.transfer_idle_s,
        )
        self._tasks.start(housekeeping.run(self._uploads, self._named))
        self._tasks.start(warn_unless_shared(folder, cluster))

    # Called by replicas; documented in `CommandSource`.

    async def register(self, registration: ReplicaRegistration) -> None:
        await self._named.note_held(registration.named)
        replica = self._registry.register(registration)
        replica.is_starting = True
        self._tasks.start(self._recovery.admit(replica))

    async def next_command(self, replica_id: str, report: CommandReport | None) -> NumberedCommand | None:
        return await self._registry.next_command(replica_id, report)

    async def record_checksum(self, replica_id: str, loaded: LoadedWeights, checksum: str) -> None:
        self._registry.record_checksum(replica_id, loaded, checksum)

    async def read_weights(self, version: int, checksum: str, offset: int, count: int) -> bytes:
        """Documented in `Payloads.read`; counterpart of `StoreSource` (`weight_sources.py`)."""
        if (adapter := self._named.path_of(version, checksum)) is not None:
            return await asyncio.to_thread(read_range, adapter, offset, count)
        return await self._payloads.read(version, checksum, offset, count)

    # Called by the ingress; documented in the classes that do the work.

    async def watch(self, seen: int | None) -> int:
        if seen is not None and seen > self._current.number:
            await self._recovery.settled()
        return await self._current.watch(seen)

    async def wait_for(self, min_version: int, version: int | None, wait_s: float | None) -> int:
        return await self._current.wait_for(min_version, version, wait_s)

    async def watch_named(self, seen: NamedVersions | None) -> NamedVersions:
        return await self._named.watch(seen)

    async def wait_for_named(
        self, name: str, min_version: int, version: int | None, wait_s: float | None
    ) -> NamedVersions:
        return await self._named.wait_for(name, min_version, version, wait_s)

    async def drop_policy(self, name: str) -> None:
        await self._tasks.finish(self._named.drop(name))

    async def state(self, checksums_within_s: float = 0.0) -> PolicyState:
        next_number = self._pushes.next_number
        return await policy_state(
            self._current, self._versions, self._uploads, self._registry, self._named, next_number, checksums_within_s
        )

    async def layout(self) -> PolicyLayout:
        return await self._initial.layout()

    async def upload_state(self, version: int, name: str | None = None) -> UploadState:
        with self._policy_of(name) as policy:
            return policy.uploads.state(version)

    async def begin_chunk(
        self, version: int, first_byte: int, owner: str | None = None, name: str | None = None
    ) -> str:
        await self._recovery.settled()
        with self._policy_of(name) as policy:
            return await policy.uploads.begin_chunk(version, first_byte, owner)

    async def write_chunk(self, version: int, sender: str, offset: int, data: bytes, name: str | None = None) -> None:
        with self._policy_of(name) as policy:
            await policy.uploads.write_chunk(version, sender, offset, data)

    async def end_chunk(
        self, version: int, sender: str, end: int, total_bytes: int | None, name: str | None = None
    ) -> UploadState:
        with self._policy_of(name) as policy:
            return await policy.uploads.end_chunk(version, sender, end, total_bytes)

    async def repeated_update(self, version: int, digest: str | None, name: str | None = None) -> PolicyUpdate | None:
        with self._policy_of(name) as policy:
            return await policy.pushes.repeated_update(version, digest)

    async def complete_upload(
        self, version: int, sender: str, options: PushOptions, is_zstd: bool, digest: str | None
    ) -> PolicyUpdate:
        with self._policy_of(options.name) as policy:
            return await policy.pushes.complete_upload(version, sender, options, is_zstd, digest)

    async def load_checkpoint(self, version: int, checkpoint: str, options: PushOptions) -> PolicyUpdate:
        await self._recovery.settled()
        with self._policy_of(options.name) as policy:
            return await policy.pushes.load_checkpoint(version, checkpoint, options)

    async def roll_back(self, to: int, version: int | None, options: SwitchOptions) -> PolicyUpdate:
        await self._recovery.settled()
        return await self._pushes.roll_back(to, version, options)

    async def init_transfer(self, init_info: dict[str, Any]) -> int:
        await self._recovery.settled()
        return await self._tasks.finish(self._transfer.init(init_info))

    async def start_transfer(self, options: SwitchOptions) -> None:
        await self._tasks.finish(self._transfer.start(options))

    async def update_transfer(self, update_info: Any) -> None:
        await self._tasks.finish(self._transfer.update(update_info))

    async def finish_transfer(self, version: int | None) -> PolicyUpdate:
        return await self._tasks.finish(self._transfer.finish(version))

    @contextmanager
    def _policy_of(self, name: str | None) -> Iterator[PushedPolicy]:
        """What is pushed to: the policy without a name, or a named one for the length of a call."""
        if name is None:
            yield PushedPolicy(self._uploads, self._pushes)
            return
        with self._named.used(name) as policy:
            yield PushedPolicy(policy.uploads, policy.pushes)
