"""The policy store, one for the service: the Serve deployment that `rpc/store_client.py` calls.

Guarantees: the current version is on disk before any replica serves it; the bytes of a version never change; two
updates never mix; a store that dies restarts from its last durable state.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployments import logs
from deployments.policy.cluster import Cluster, RayCluster, cluster_weights_folder, warn_unless_shared
from deployments.policy.policies import PolicyRegistry
from deployments.policy.replicas.commands import (
    CommandReport,
    CommandSource,
    LoadedWeights,
    NumberedCommand,
    ReplicaRegistration,
)
from deployments.policy.replicas.file_fetch import WeightsSource
from deployments.policy.replicas.replica_registry import ReplicaRegistry
from deployments.policy.settings import PolicySettings
from deployments.policy.transfer.completion import TransferReload, TransferSaving
from deployments.policy.transfer.trusted_trainers import TrustedTrainers
from deployments.policy.transfer.weight_transfer import WeightTransfer, world_size
from deployments.policy.update.activation import ChainCompaction, ReplicaInitializer, VersionActivation
from deployments.policy.update.folder_follower import FolderFollower
from deployments.policy.update.payloads import Payloads
from deployments.policy.update.pushes import Pushes
from deployments.policy.update.recovery import SETTLE_S, Recovery, WeightReadback
from deployments.policy.update.two_phase_update import Updater
from deployments.policy.update.update_lock import UpdateLock
from deployments.policy.versions.current_version import NamedVersions
from deployments.policy.versions.full_weights import InitialVersion
from deployments.policy.versions.housekeeping import Housekeeping
from deployments.policy.versions.run_identity import RunIdentity
from deployments.policy.versions.version_store import VersionStore
from deployments.policy.weight_sources import generator_source
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.policy import (
    FollowState,
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    PushOptions,
    ReplicaPolicy,
    SwitchOptions,
    UploadState,
)


class PolicyStore(CommandSource):
    """All policies of the service, and the updates of its replicas.

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
        version_store = VersionStore(folder)
        run = RunIdentity(settings.run, model, revision).claim(version_store)
        self._initial = InitialVersion(model, version_store.weights(0), max_lora_rank, revision)
        self._tasks = BackgroundTasks()
        housekeeping = Housekeeping(version_store.trash)
        self.policies = PolicyRegistry(folder, settings, run, self._initial, self._tasks, housekeeping)
        versions = self.policies.unnamed.versions

        self.registry = ReplicaRegistry(
            cluster, settings.command_timeout_s, settings.command_timeout_s_per_gb, settings.canary_timeout_s
        )
        self.update_lock = UpdateLock()
        self.payloads = Payloads(self.policies, self.registry, cluster.node_id(), settings.copy_to_nodes)
        initializer = ReplicaInitializer(self.policies, self.registry, self.payloads, self.update_lock)
        compaction = ChainCompaction(versions, self._tasks, settings.longest_delta_chain)
        activation = VersionActivation(self.policies, self.payloads, initializer, housekeeping, compaction)
        self.updater = Updater(
            self.policies,
            self.registry,
            self.payloads,
            initializer,
            activation,
            self.update_lock,
            is_rolling=settings.activation == "rolling",
        )
        self._pushes = Pushes(self.updater, settings.checkpoint_roots, housekeeping)
        readback = WeightReadback(self.registry, versions, source_of, cluster.node_id())
        self._recovery = Recovery(
            self.registry, self.policies, activation, initializer, self.update_lock, readback, self._tasks, settle_s
        )
        self.transfer = WeightTransfer(
            self.registry,
            self.policies,
            activation,
            self.update_lock,
            TrustedTrainers(settings.transfer.trainers),
            TransferReload(self.registry, versions, self.payloads, initializer, settings.transfer_idle_s),
            TransferSaving(self.registry, self._initial, self._recovery, self._tasks, settings.transfer.save_weights),
            self._tasks,
            settings.transfer.rendezvous_timeout_s,
            settings.transfer_idle_s,
        )
        self._follower: FolderFollower | None = None
        if settings.follow is not None:
            self._follower = FolderFollower(settings.follow, self.policies.unnamed, self._pushes)
            self._tasks.start(self._follow(self._follower))
        self._tasks.start(housekeeping.run(self.policies))
        self._tasks.start(warn_unless_shared(folder, cluster))

    async def _follow(self, follower: FolderFollower) -> None:
        await self._recovery.settled()
        await follower.run()

    # Called by replicas; documented in `CommandSource`.

    async def register(self, registration: ReplicaRegistration) -> None:
        await self.policies.record_served(registration.named)
        replica = self.registry.register(registration)
        replica.is_starting = True
        self._tasks.start(self._recovery.admit(replica))

    async def next_command(self, replica_id: str, report: CommandReport | None) -> NumberedCommand | None:
        return await self.registry.next_command(replica_id, report)

    async def record_checksum(self, replica_id: str, loaded: LoadedWeights, checksum: str) -> None:
        self.registry.record_checksum(replica_id, loaded, checksum)

    async def read_weights(self, version: int, checksum: str, offset: int, count: int) -> bytes:
        """Documented in `Payloads.read`; counterpart of `StoreSource` (`weight_sources.py`)."""
        return await self.payloads.read(version, checksum, offset, count)

    # Called by the ingress; documented in the classes that do the work.

    async def watch(self, seen: int | None) -> int:
        current = self.policies.unnamed.current
        if seen is not None and seen > current.number:
            await self._recovery.settled()
        return await current.watch(seen)

    async def wait_for(self, min_version: int, version: int | None, wait_s: float | None) -> int:
        return await self.policies.unnamed.current.wait_for(min_version, version, wait_s)

    async def watch_named(self, seen: NamedVersions | None) -> NamedVersions:
        return await self.policies.watch_named(seen)

    async def wait_for_named(
        self, name: str, min_version: int, version: int | None, wait_s: float | None
    ) -> NamedVersions:
        return await self.policies.wait_for_named(name, min_version, version, wait_s)

    async def drop_policy(self, name: str) -> None:
        await self._tasks.finish(self.updater.drop(name))

    async def state(self, checksums_within_s: float = 0.0) -> PolicyState:
        """Has replicas compute their checksums and waits at most `checksums_within_s`; with 0 none is asked."""
        await self.registry.drop_dead()
        await self.registry.ask_for_checksums(checksums_within_s)
        policy = self.policies.unnamed
        return PolicyState(
            current=policy.current.number,
            updating_to=policy.versions.updating_to,
            versions=policy.versions.list(),
            replicas=[
                ReplicaPolicy(
                    replica_id=replica.replica_id,
                    version=replica.loaded.version,
                    checksum=replica.checksum,
                    accepts_requests=replica.accepts_requests,
                )
                for replica in self.registry.replicas
            ],
            transfer_world_size=world_size([replica.registration.workers for replica in self.registry.started]),
            next_version=policy.next_number(),
            uploads=policy.upload_store.states(),
            named=[each.state() for each in self.policies.named.values() if each.is_known],
            follow=await self.follow_state(),
        )

    async def follow_state(self) -> FollowState | None:
        """`None` if no folder is followed."""
        return None if self._follower is None else await asyncio.to_thread(self._follower.state)

    async def layout(self) -> PolicyLayout:
        return await self._initial.layout()

    async def upload_state(self, version: int, name: str | None = None) -> UploadState:
        with self.policies.used(name) as policy:
            return policy.upload_store.state(version)

    async def begin_chunk(
        self, version: int, first_byte: int, owner: str | None = None, name: str | None = None
    ) -> str:
        await self._recovery.settled()
        with self.policies.used(name) as policy:
            return await self._tasks.finish(policy.uploads.begin_chunk(version, first_byte, owner))

    async def write_chunk(self, version: int, sender: str, offset: int, data: bytes, name: str | None = None) -> None:
        with self.policies.used(name) as policy:
            await self._tasks.finish(policy.uploads.write_chunk(version, sender, offset, data))

    async def end_chunk(
        self, version: int, sender: str, end: int, total_bytes: int | None, name: str | None = None
    ) -> UploadState:
        with self.policies.used(name) as policy:
            return await self._tasks.finish(policy.uploads.end_chunk(version, sender, end, total_bytes))

    async def repeated_update(self, version: int, digest: str | None, name: str | None = None) -> PolicyUpdate | None:
        with self.policies.used(name) as policy:
            return await self._pushes.repeated_update(policy, version, digest)

    async def complete_upload(
        self, version: int, sender: str, options: PushOptions, is_zstd: bool, digest: str | None
    ) -> PolicyUpdate:
        with self.policies.used(options.name) as policy:
            return await self._pushes.complete_upload(policy, version, sender, options, is_zstd, digest)

    async def load_checkpoint(self, version: int, checkpoint: str, options: PushOptions) -> PolicyUpdate:
        await self._recovery.settled()
        with self.policies.used(options.name) as policy:
            return await self._pushes.load_checkpoint(policy, version, checkpoint, options)

    async def roll_back(
        self, to: int, version: int | None, options: SwitchOptions, name: str | None = None
    ) -> PolicyUpdate:
        await self._recovery.settled()
        with self.policies.used(name) as policy:
            return await self._pushes.roll_back(policy, to, version, options, self.policies.unnamed)

    async def init_transfer(self, init_info: dict[str, Any]) -> int:
        await self._recovery.settled()
        return await self._tasks.finish(self.transfer.init(init_info))

    async def start_transfer(self, options: SwitchOptions) -> None:
        await self._tasks.finish(self.transfer.start(options))

    async def update_transfer(self, update_info: Any) -> None:
        await self._tasks.finish(self.transfer.update(update_info))

    async def finish_transfer(self, version: int | None) -> PolicyUpdate:
        return await self._tasks.finish(self.transfer.finish(version))
