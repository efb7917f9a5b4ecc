"""The policy store, one for the service: the Serve deployment that `rpc/handle_calls.py` calls.

A push is a complete upload, a checkpoint at a path or URL, a version of the followed folder, or a stored version again,
which every replica loads.

Guarantees: the current version is on disk before any replica serves it; the bytes of a version never change; two
updates never mix; a store that dies restarts from its last durable state. A push goes on if its caller goes away; the
same push sent again, while the first is under way or after it, has the same result; a version that is refused leaves
the current one serving, and its number is free again; an upload that is refused is removed, except where trying again
can help.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from deployments import logs
from deployments.policy.cluster import Cluster, RayCluster, cluster_weights_folder
from deployments.policy.commands import (
    CommandReport,
    CommandSource,
    Hold,
    LoadedWeights,
    NumberedCommand,
    Release,
    ReplicaRegistration,
)
from deployments.policy.failures import PauseRefused, PolicyFailure, UpdateUnderWay, VersionUnknown, VersionUntried
from deployments.policy.folder_follower import FolderFollower
from deployments.policy.policies import Policy, PolicyRegistry
from deployments.policy.preparation import PreparedVersion, VersionPreparation
from deployments.policy.published import PublishedChain
from deployments.policy.replica_loading import ReplicaLoading
from deployments.policy.replica_registry import ReplicaRegistry, ReplicaTimedOut, error_of
from deployments.policy.run_identity import RunIdentity
from deployments.policy.settings import PolicySettings
from deployments.policy.update import Updates
from deployments.policy.versions import InitialVersion
from deployments.policy.weight_transfer import WeightTransfer, world_size
from deployments.protocols.weight_versions import CurrentVersions
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.policy import (
    FollowState,
    PauseMode,
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    PushOptions,
    ReplicaPolicy,
    SwitchOptions,
    UploadState,
)

Prepare = Callable[[Path], PreparedVersion]
"""Prepares a version in a folder; called in a thread."""
logger = logging.getLogger("rollout_service.policy")


class PolicyStore(CommandSource):
    """All policies of the service, and the updates of its replicas.

    Args:
        model: folder or hub name of the checkpoint that engines start with, version 0.
        revision: of a model of the hub.
        max_lora_rank: as in `PolicyLayout`.
        draft: folder or hub name of the model that drafts, if there is one.

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
        draft: str | None = None,
    ) -> None:
        logs.configure()
        cluster = RayCluster() if cluster is None else cluster
        folder = Path(settings.folder).expanduser() if settings.folder else cluster_weights_folder() / "policy"
        RunIdentity(settings.run, model, revision).claim(folder)
        self._initial = InitialVersion(model, folder, max_lora_rank, revision, draft)
        self._tasks = BackgroundTasks()
        self.policies = PolicyRegistry(folder, settings, self._initial, self._tasks)

        self.registry = ReplicaRegistry(
            cluster, settings.command_timeout_s, settings.command_timeout_s_per_gb, settings.canary_timeout_s
        )
        self.loading = ReplicaLoading(self.policies, self.registry, cluster.node_id(), settings.copy_to_nodes)
        is_rolling = settings.activation == "rolling"
        self._updates = Updates(self.policies, self.registry, self.loading, self._tasks, is_rolling)
        self._tasks.start(self._updates.write_full_weights())
        self._checkpoint_roots = settings.checkpoint_roots
        self._holds = 0
        """How many times somebody has asked for a hold or for its end."""
        self._is_released = False
        """Whether that was its end."""
        self.transfer = WeightTransfer(
            settings, self.registry, self.policies.unnamed, self._updates, self.loading, self._tasks, cluster
        )
        self._follower: FolderFollower | None = None
        if settings.follow is not None:
            self._follower = FolderFollower(settings.follow, self.policies.unnamed, self._take_published)
            self._tasks.start(self._follower.run())
        self._tasks.start(self.policies.run())

    # Called by replicas; documented in `CommandSource`.

    async def register(self, registration: ReplicaRegistration) -> None:
        replica = self.registry.register(registration)
        replica.is_starting = True
        if self._is_released and registration.held_s:
            self._tasks.start(self.registry.send(replica, Release()))
        self._tasks.start(self.loading.admit(replica))

    async def next_command(self, replica_id: str, report: CommandReport | None) -> NumberedCommand | None:
        return await self.registry.next_command(replica_id, report)

    async def record_checksum(self, replica_id: str, loaded: LoadedWeights, checksum: str) -> None:
        self.registry.record_checksum(replica_id, loaded, checksum)

    async def read_weights(self, version: int, checksum: str, offset: int, count: int) -> bytes:
        """Documented in `ReplicaLoading.read`; `NodeWeights` of other nodes call it."""
        return await self.loading.read(version, checksum, offset, count)

    # Called by the ingress; documented in the classes that do the work.

    async def watch(self, seen: CurrentVersions | None) -> CurrentVersions:
        return await self.policies.watch(seen)

    async def wait_for(
        self, name: str | None, min_version: int, version: int | None, wait_s: float | None, takes_offered: bool = False
    ) -> CurrentVersions:
        return await self.policies.wait_for(name, min_version, version, wait_s, takes_offered)

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
        return await asyncio.to_thread(lambda: self._initial.layout)

    async def upload_state(self, version: int, name: str | None = None) -> UploadState:
        """Raises `VersionUnknown` if nothing of it has arrived."""
        policy = self.policies.find(name)
        if policy is None or (state := policy.uploads.find(version)) is None:
            raise VersionUnknown.of("version", "nothing of it has arrived; begin at its first byte", version)
        return state

    async def write_chunk(
        self, version: int, sender: str | None, offset: int, data: bytes, name: str | None = None
    ) -> str:
        return await self._tasks.finish(self.policies.of(name).uploads.write(version, sender, offset, data))

    async def repeated_update(self, version: int, digest: str | None, name: str | None = None) -> PolicyUpdate | None:
        """The result of an earlier push of the same upload, whose answer may have been lost; `None` if there was none.

        Raises:
            PolicyFailure: as the earlier push does, which is still under way.
        """
        if digest is None or (policy := self.policies.find(name)) is None:
            return None
        if (update := await policy.result_of_same(version, digest)) is not None:
            return update
        stored = policy.versions.find(version)
        if stored is None or version > policy.current or stored.upload_digest != digest:
            return None
        if policy.last_update is not None and policy.last_update.version == version:
            return policy.last_update
        return policy.update_to(stored)

    async def complete_upload(
        self, version: int, sender: str, options: PushOptions, is_zstd: bool, digest: str | None
    ) -> PolicyUpdate:
        """Pushes the upload of `version`, all of which has arrived.

        Args:
            digest: the `weights_digest` of the upload, as its sender says.

        Raises:
            PolicyFailure: the current version goes on serving.
        """
        policy = self.policies.of(options.name)
        policy.uploads.refuse_active(version)
        policy.uploads.refuse_overtaken(version, sender)
        upload = policy.uploads.path(version)
        prepare = partial(self._preparation(policy).from_upload, version, options, upload, is_zstd, digest)
        push = self._push_upload(policy, version, options, prepare)
        return await policy.push(version, digest, self._recorded(policy, version, push))

    async def load_checkpoint(self, version: int | None, checkpoint: str, options: PushOptions) -> PolicyUpdate:
        """Pushes the checkpoint at a path or URL under the configured roots; raises as `complete_upload` does.

        Args:
            version: by default the next number, also where the same checkpoint is being pushed: it may have changed.
        """
        policy = self.policies.of(options.name)
        number = policy.next_number() if version is None else version
        prepare = partial(self._preparation(policy).from_checkpoint, number, options, checkpoint)
        return await self._push_once(policy, number, checkpoint, options, prepare)

    async def roll_back(
        self, to: int, version: int | None, options: SwitchOptions, name: str | None = None
    ) -> PolicyUpdate:
        """Makes the stored weights of version `to` of the policy without a name a new version of `name`.

        Args:
            version: by default the next number.

        Raises:
            VersionUnknown: its weights are not stored here, or no longer.
            WeightsRefused: `name` is given, and the version is no adapter for the current full weights.
            PolicyFailure: as `complete_upload` does.
        """
        policy, source = self.policies.of(name), self.policies.unnamed.versions
        number = policy.next_number() if version is None else version
        prepare = partial(self._preparation(policy).from_stored, number, to, source)
        push_options = PushOptions(**options.model_dump())
        return await self._push_once(policy, number, f"rollback to {to}", push_options, prepare)

    async def _take_published(self, chain: PublishedChain, folder: str, options: PushOptions) -> PolicyUpdate:
        """Pushes a version of the followed `folder`; raises as `complete_upload` does, and `SourceRefused`."""
        policy = self.policies.unnamed
        prepare = partial(self._preparation(policy).from_publication, chain, options, folder)
        return await self._push_once(policy, chain.version, chain.source, options, prepare)

    def _preparation(self, policy: Policy) -> VersionPreparation:
        return VersionPreparation(policy.versions, self._checkpoint_roots)

    async def _push_once(
        self, policy: Policy, version: int, content: str, options: PushOptions, prepare: Prepare
    ) -> PolicyUpdate:
        """Runs the push, or waits for the same one if that is under way."""
        if (update := await policy.result_of_same(version, content)) is not None:
            return update
        policy.uploads.refuse_active(version)
        push = self._push(policy, version, options, prepare)
        return await policy.push(version, content, self._recorded(policy, version, push))

    async def _push_upload(self, policy: Policy, version: int, options: PushOptions, prepare: Prepare) -> PolicyUpdate:
        try:
            update = await self._push(policy, version, options, prepare)
        except (UpdateUnderWay, VersionUntried):
            # Trying again can help: a sender who sends the last chunk again need not send the others.
            raise
        except PolicyFailure:
            policy.uploads.drop(version)
            raise
        policy.uploads.drop(version)
        return update

    async def _push(self, policy: Policy, version: int, options: PushOptions, prepare: Prepare) -> PolicyUpdate:
        self._updates.refuse(policy, version, options)
        with policy.versions.workspace(version) as folder:
            prepared = await asyncio.to_thread(prepare, folder)
            return await self._updates.update(policy, prepared.info, prepared.file, options)

    async def _recorded(self, policy: Policy, version: int, push: Coroutine[Any, Any, PolicyUpdate]) -> PolicyUpdate:
        label, extra = policy.label(version), policy.log_extra(version)
        try:
            policy.last_update = update = await push
            for warning in update.warnings:
                logger.warning("Version %s: %s", label, warning, extra=extra)
        except PolicyFailure as failure:
            logger.info("Version %s is refused: %s", label, failure, extra=extra)
            raise
        except Exception as error:
            logger.warning("The update to version %s failed.", label, exc_info=error, extra=extra)
            raise
        return update

    async def hold(self, mode: PauseMode, lease_s: float) -> None:
        """Has all replicas that have started generate nothing until `release`, new weights or a new adapter.

        An update that is under way ends first.

        Args:
            lease_s: seconds from now, after which they go on by themselves.

        Raises:
            PauseRefused: a replica could not, or somebody has asked for another hold or its end before it was made.
        """
        self._holds += 1
        self._is_released = False
        await self._tasks.finish(self._hold(self._holds, mode, asyncio.get_running_loop().time() + lease_s))

    async def _hold(self, number: int, mode: PauseMode, ends_at: float) -> None:
        async with self.registry.update_lock.lease():
            if number != self._holds:
                raise PauseRefused.of("mode", "it was released, or another pause has taken its place", mode)
            if (lease_s := ends_at - asyncio.get_running_loop().time()) <= 0:
                raise PauseRefused.of("mode", "an update took longer than the whole pause may; ask again", mode)
            results = await self.registry.send_all(self.registry.started, Hold(mode, lease_s))
        # One that died generates nothing.
        left = (result for result in results.values() if isinstance(result, CommandReport | ReplicaTimedOut))
        if errors := [error for error in map(error_of, left) if error is not None]:
            await self._release()
            message = f"a replica could not pause: {errors[0]}; wait less, or let trainers.pause_s be longer"
            raise PauseRefused.of("mode", message, mode)

    async def release(self) -> None:
        """Ends a hold, also one that is being made. Raises `PauseRefused` if a replica that lives could not."""
        self._holds += 1
        self._is_released = True
        await self._tasks.finish(self._release())

    async def _release(self) -> None:
        results = await self.registry.send_all(self.registry.replicas, Release())
        reports = [result for result in results.values() if isinstance(result, CommandReport)]
        if errors := [report.error for report in reports if report.error is not None]:
            raise PauseRefused.of("resume", f"a replica could not go on: {errors[0]}")

    async def is_paused(self) -> bool:
        """Whether replicas are held, or wait for the weights of a transfer."""
        return self.registry.is_held or self.transfer.is_under_way

    async def init_transfer(self, init_info: dict[str, Any]) -> int:
        return await self._tasks.finish(self.transfer.init(init_info))

    async def start_transfer(self, options: SwitchOptions) -> None:
        await self._tasks.finish(self.transfer.start(options))

    async def update_transfer(self, update_info: Any) -> None:
        await self._tasks.finish(self.transfer.update(update_info))

    async def finish_transfer(self, version: int | None) -> PolicyUpdate:
        return await self._tasks.finish(self.transfer.finish(version))
