"""The policy store, one for the service: the Serve deployment that `rpc/store_client.py` calls.

Guarantees: the current version is on disk before any replica serves it; the bytes of a version never change; two
updates never mix; a store that dies restarts from its last durable state.
"""

import asyncio
from pathlib import Path
from typing import Any

from deployments import logs
from deployments.policy.cluster import Cluster, RayCluster, cluster_weights_folder, warn_unless_shared
from deployments.policy.commands import (
    CommandReport,
    CommandSource,
    LoadedWeights,
    NumberedCommand,
    ReplicaRegistration,
)
from deployments.policy.folder_follower import FolderFollower
from deployments.policy.initial_version import InitialVersion
from deployments.policy.policies import PolicyRegistry
from deployments.policy.pushes import Pushes
from deployments.policy.replica_loading import Payloads, ReplicaLoading
from deployments.policy.replica_registry import ReplicaRegistry
from deployments.policy.run_identity import RunIdentity
from deployments.policy.settings import PolicySettings
from deployments.policy.trusted_trainers import TrustedTrainers
from deployments.policy.update import Updates
from deployments.policy.weight_transfer import WeightTransfer, world_size
from deployments.protocols.weight_versions import CurrentVersions
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

    Raises:
        FolderRefused: the configured folder holds versions of another model or run.
    """

    def __init__(
        self,
        settings: PolicySettings,
        model: str,
        revision: str | None = None,
        cluster: Cluster | None = None,
        max_lora_rank: int | None = None,
    ) -> None:
        logs.configure()
        cluster = RayCluster() if cluster is None else cluster
        folder = Path(settings.folder).expanduser() if settings.folder else cluster_weights_folder() / "policy"
        RunIdentity(settings.run, model, revision).claim(folder)
        self._initial = InitialVersion(model, folder, max_lora_rank, revision)
        self._tasks = BackgroundTasks()
        self.policies = PolicyRegistry(folder, settings, self._initial, self._tasks)

        self.registry = ReplicaRegistry(
            cluster, settings.command_timeout_s, settings.command_timeout_s_per_gb, settings.canary_timeout_s
        )
        self.payloads = Payloads(self.policies, self.registry, cluster.node_id(), settings.copy_to_nodes)
        self._loading = ReplicaLoading(self.policies, self.registry, self.payloads)
        self._updates = Updates(
            self.policies,
            self.registry,
            self.payloads,
            self._loading,
            self._tasks,
            is_rolling=settings.activation == "rolling",
        )
        self._pushes = Pushes(self._updates, settings.checkpoint_roots)
        self.transfer = WeightTransfer(
            self.registry,
            self.policies,
            self._updates,
            TrustedTrainers(settings.transfer.trainers),
            self._loading,
            self._tasks,
            settings.transfer.rendezvous_timeout_s,
            settings.transfer_idle_s,
        )
        self._follower: FolderFollower | None = None
        if settings.follow is not None:
            self._follower = FolderFollower(settings.follow, self.policies.unnamed, self._pushes)
            self._tasks.start(self._follower.run())
        self._updates.write_full_weights()
        self._tasks.start(self.policies.run())
        self._tasks.start(warn_unless_shared(folder, cluster))

    # Called by replicas; documented in `CommandSource`.

    async def register(self, registration: ReplicaRegistration) -> None:
        replica = self.registry.register(registration)
        replica.is_starting = True
        self._tasks.start(self._loading.admit(replica))

    async def next_command(self, replica_id: str, report: CommandReport | None) -> NumberedCommand | None:
        return await self.registry.next_command(replica_id, report)

    async def record_checksum(self, replica_id: str, loaded: LoadedWeights, checksum: str) -> None:
        self.registry.record_checksum(replica_id, loaded, checksum)

    async def read_weights(self, version: int, checksum: str, offset: int, count: int) -> bytes:
        """Documented in `Payloads.read`; `NodeWeights` of other nodes call it."""
        return await self.payloads.read(version, checksum, offset, count)

    # Called by the ingress; documented in the classes that do the work.

    async def watch(self, seen: CurrentVersions | None) -> CurrentVersions:
        return await self.policies.watch(seen)

    async def wait_for(
        self, name: str | None, min_version: int, version: int | None, wait_s: float | None
    ) -> CurrentVersions:
        return await self.policies.wait_for(name, min_version, version, wait_s)

    async def drop_policy(self, name: str) -> None:
        await self._tasks.finish(self._updates.drop(name))

    async def state(self, checksums_within_s: float = 0.0) -> PolicyState:
        """Has replicas compute their checksums and waits at most `checksums_within_s`; with 0 none is asked."""
        await self.registry.drop_dead()
        await self.registry.ask_for_checksums(checksums_within_s)
        policy = self.policies.unnamed
        return PolicyState(
            current=policy.current,
            updating_to=policy.versions.updating_to,
            versions=policy.versions.infos(),
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
            uploads=policy.uploads.states(),
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
            return policy.uploads.state(version)

    async def begin_chunk(
        self, version: int, first_byte: int, owner: str | None = None, name: str | None = None
    ) -> str:
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
        with self.policies.used(options.name) as policy:
            return await self._pushes.load_checkpoint(policy, version, checkpoint, options)

    async def roll_back(
        self, to: int, version: int | None, options: SwitchOptions, name: str | None = None
    ) -> PolicyUpdate:
        with self.policies.used(name) as policy:
            return await self._pushes.roll_back(policy, to, version, options, self.policies.unnamed)

    async def init_transfer(self, init_info: dict[str, Any]) -> int:
        return await self._tasks.finish(self.transfer.init(init_info))

    async def start_transfer(self, options: SwitchOptions) -> None:
        await self._tasks.finish(self.transfer.start(options))

    async def update_transfer(self, update_info: Any) -> None:
        await self._tasks.finish(self.transfer.update(update_info))

    async def finish_transfer(self, version: int | None) -> PolicyUpdate:
        return await self._tasks.finish(self.transfer.finish(version))
