"""The policy store, one for the service: which weights are current, how they come in, how every replica gets them.

Guarantees: what is current is on disk before any replica serves it; a version's number and bytes never change; two
updates never mix; a store that dies comes back knowing what was current and what had arrived.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from deployments import logs
from deployments.policy.cluster import Cluster, RayCluster, cluster_weights_folder
from deployments.policy.command_source import CommandSource
from deployments.policy.commands import (
    AcceptRequests,
    CommandReport,
    LoadedWeights,
    NumberedCommand,
    ReplicaRegistration,
    SwapOptions,
)
from deployments.policy.failures import (
    ChunkDamaged,
    ChunkMisplaced,
    PolicyNotCurrent,
    UpdateUnderWay,
    VersionRefused,
)
from deployments.policy.replica_registry import RegisteredReplica, ReplicaRegistry
from deployments.policy.settings import PolicySettings
from deployments.policy.transfer import Transfer
from deployments.policy.update import Fleet, bring_up, error_of, update_all
from deployments.policy.validation import (
    fetched_checkpoint,
    most_bytes_of,
    sha256_of,
    too_large,
    unpack_zstd,
    write_adapter,
    write_checkpoint,
)
from deployments.policy.version_store import StoredVersion, VersionStore
from deployments.policy.weights import PolicyWeights
from rollout_client.policy_contract import (
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    PushOptions,
    ReplicaPolicy,
    SwitchOptions,
    UploadState,
)
from rollout_client.problem_contract import FieldProblem

logger = logging.getLogger("rollout_service")
LONG_POLL_S = 5.0
CHECKSUM_POLL_S = 0.05
OVERTAKEN = "another sender has begun a piece of the same version since, or all of it has arrived"
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class ActiveUpdate:
    """A version of which all is known, on its way to become current.

    `content` is how a repeated call knows it again: the digest that the sender of an upload said, or the checkpoint.
    """

    content: str | None
    task: asyncio.Task[PolicyUpdate]


class PolicyStore(CommandSource):
    """Args: `model` is the folder or hub name of the checkpoint that engines begin with, version 0."""

    def __init__(self, settings: PolicySettings, model: str, cluster: Cluster | None = None) -> None:
        logs.configure()
        cluster = RayCluster() if cluster is None else cluster
        self._settings = settings
        self._version_store = VersionStore(policy_folder(settings))
        self._version_store.sweep()
        self._weights = PolicyWeights(self._version_store, model, cluster.put)
        self._current = self._version_store.current()
        self._bringing: dict[int, ActiveUpdate] = {}
        self._senders: dict[int, str] = {}
        """Who began the last piece of each upload: only what that one sends counts."""
        self._writing = asyncio.Lock()
        self._updating_to: int | None = None
        self._last_update: PolicyUpdate | None = None
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._registry = ReplicaRegistry(cluster.is_alive)
        self._fleet = Fleet(
            self._registry, lambda member: cluster.kill(member.registration.actor), settings.command_timeout_s
        )
        self._transfer = Transfer(self._fleet, settings.transfer_idle_s)

    # What replicas ask.

    async def register(self, registration: ReplicaRegistration) -> None:
        """Takes the replica in and brings it to the current version, then tells it to take calls."""
        self._begin(self._bring_up(self._registry.register(registration)))

    async def next_command(self, replica_id: str, report: CommandReport | None) -> NumberedCommand | None:
        """Raises `ReplicaNotRegistered`."""
        return await self._registry.next_command(replica_id, report)

    async def record_checksum(self, replica_id: str, loaded: LoadedWeights, checksum: str) -> None:
        """Raises `ReplicaNotRegistered`."""
        self._registry.record_checksum(replica_id, loaded, checksum)

    async def _bring_up(self, member: RegisteredReplica) -> None:
        async with self._lock:
            try:
                payloads = await asyncio.to_thread(self._weights.payloads_for, member.loaded)
            except Exception as error:
                logger.exception("The current weights cannot be brought to replica %s.", member.replica_id)
                self._fleet.give_up_unless_gone(member, str(error))
                return
            # Weights that a trainer sent straight to the replicas are not here: it waits for the next ones.
            if payloads is not None and await bring_up(self._fleet, member, payloads):
                await self._let_take_calls()

    async def _let_take_calls(self) -> None:
        due = self._weights.due
        waiting = [member for member in self._registry.members if not member.accepts_requests and member.loaded == due]
        for member in waiting:
            member.accepts_requests = True
        answers = await self._fleet.ask_all(waiting, AcceptRequests())
        for member, answer in zip(waiting, answers, strict=True):
            if (error := error_of(answer)) is not None:
                self._fleet.give_up_unless_gone(member, error)

    # What rollouts and trainers ask.

    async def watch(self, seen: int | None) -> int:
        """The current version, as soon as it is another than `seen`, or after a while."""
        return await self._current_when(lambda: self._current != seen, LONG_POLL_S)

    async def wait_for(self, min_version: int, version: int | None, wait_s: float | None) -> int:
        """Returns the current version once it is at least `min_version`, and just `version` where that is given.

        Raises:
            PolicyNotCurrent: it has not become so within `wait_s`, or cannot any more.
        """
        wait_s = self._settings.wait_s if wait_s is None else min(wait_s, self._settings.wait_s)
        due = max(min_version, version or 0)
        current = await self._current_when(lambda: self._current >= due, wait_s)
        if current < due or (version is not None and current != version):
            field = "policy.min_version" if version is None else "policy.version"
            how = f"it is not there after {wait_s:g} s" if current < due else "a newer one has taken its place"
            value = min_version if version is None else version
            raise PolicyNotCurrent(
                FieldProblem(field=field, message=f"{how}; version {current} is current", value=value)
            )
        return current

    async def state(self, checksums_within_s: float) -> PolicyState:
        """Waits at most so long for checksums of the engines' weights that are still being made."""
        await self._registry.forget_the_dead()
        give_up_at = asyncio.get_running_loop().time() + checksums_within_s
        while any(member.checksum is None for member in self._registry.members):
            if asyncio.get_running_loop().time() >= give_up_at:
                break
            await asyncio.sleep(CHECKSUM_POLL_S)
        members = self._registry.members
        return PolicyState(
            current=self._current,
            updating_to=self._updating_to,
            versions=self._weights.versions(),
            replicas=[
                ReplicaPolicy(replica_id=member.replica_id, version=member.loaded.version, checksum=member.checksum)
                for member in members
            ],
            transfer_world_size=1 + sum(member.registration.workers for member in members),
        )

    async def layout(self) -> PolicyLayout:
        return await asyncio.to_thread(lambda: self._weights.layout)

    # Ways in.

    async def upload_state(self, version: int) -> UploadState:
        """Raises `VersionUnknown`."""
        return self._version_store.upload_state(version)

    async def begin_chunk(self, version: int, first_byte: int) -> str:
        """Returns the name of its sender, who alone may go on until another piece of the version is begun.

        Raises:
            VersionRefused, ChunkMisplaced: it cannot begin there.
        """
        async with self._writing:
            self._refuse_taken(version)
            self._refuse_if_brought(version)
            self._version_store.begin_chunk(version, first_byte)
            sender = self._senders[version] = uuid4().hex
            return sender

    async def write_chunk(self, version: int, sender: str, offset: int, data: bytes) -> None:
        """Takes bytes in that count once the piece has ended.

        Raises:
            ChunkMisplaced: another sender has begun a piece since, or the upload was dropped.
            WeightsRefused: there are more bytes than weights can have; the upload is dropped.
        """
        await self._in_background(self._write(version, sender, offset, data))

    async def _write(self, version: int, sender: str, offset: int, data: bytes) -> None:
        most_bytes = most_bytes_of(await self.layout())
        async with self._writing:
            self._refuse_overtaken(version, sender)
            if offset + len(data) > most_bytes:
                self._version_store.drop_upload(version)
                raise too_large(most_bytes)
            await asyncio.to_thread(self._version_store.write_chunk, version, offset, data)

    async def end_chunk(self, version: int, sender: str, end: int, total_bytes: int | None) -> UploadState:
        """Raises what `write` raises."""
        async with self._writing:
            self._refuse_overtaken(version, sender)
            return self._version_store.end_chunk(version, end, total_bytes)

    def _refuse_overtaken(self, version: int, sender: str) -> None:
        if self._senders.get(version) != sender or version in self._bringing:
            raise ChunkMisplaced(FieldProblem(field="content-range", message=OVERTAKEN))

    async def repeated_update(self, version: int, digest: str | None) -> PolicyUpdate | None:
        """What an earlier call of the same content brings about, its answer perhaps lost; `None` if there was none.

        Raises:
            PolicyFailure: as the earlier call does, which is still under way.
        """
        bringing = self._bringing.get(version)
        if bringing is not None and digest is not None and bringing.content == digest:
            return await asyncio.shield(bringing.task)
        stored = next((stored for stored in self._version_store.versions() if stored.version == version), None)
        if stored is None or version > self._current or digest is None or stored.upload_digest != digest:
            return None
        last = self._last_update
        if last is not None and last.version == version:
            return last
        return PolicyUpdate(version=version, checksum=stored.checksum, replicas=[])

    async def complete_upload(
        self, version: int, sender: str, options: PushOptions, is_zstd: bool, digest: str | None
    ) -> PolicyUpdate:
        """Checks what has arrived of `version` and brings it to every replica; goes on if the caller goes away.

        Args:
            digest: sha-256 (hex) of the whole upload, as its sender says.

        Raises:
            PolicyFailure: the current version goes on serving.
        """
        self._refuse_if_brought(version)
        self._refuse_overtaken(version, sender)
        return await self._bring(version, digest, self._complete_upload(version, options, is_zstd, digest))

    async def load_checkpoint(self, version: int, checkpoint: str, options: PushOptions) -> PolicyUpdate:
        """Reads, checks and brings to every replica the checkpoint at a path or URL; raises `PolicyFailure`."""
        bringing = self._bringing.get(version)
        if bringing is not None and bringing.content == checkpoint:
            return await asyncio.shield(bringing.task)
        self._refuse_if_brought(version)
        return await self._bring(version, checkpoint, self._load_checkpoint(version, checkpoint, options))

    async def _bring(self, version: int, content: str | None, work: Coroutine[Any, Any, PolicyUpdate]) -> PolicyUpdate:
        task = self._begin(work)
        self._bringing[version] = ActiveUpdate(content, task)
        task.add_done_callback(lambda _: self._bringing.pop(version))
        return await asyncio.shield(task)

    async def _complete_upload(
        self, version: int, options: PushOptions, is_zstd: bool, digest: str | None
    ) -> PolicyUpdate:
        self._refuse_taken(version)
        self._refuse_if_busy(options)
        upload = self._version_store.upload_path(version)
        try:
            arrived = await asyncio.to_thread(sha256_of, upload)
            if digest is not None and arrived != digest:
                message = f"what arrived has {arrived}; send it anew"
                raise ChunkDamaged(FieldProblem(field="repr-digest", message=message, value=digest))
            with self._version_store.workspace(version) as folder:
                most_bytes = most_bytes_of(await self.layout())
                weights = await asyncio.to_thread(unpacked, upload, folder, most_bytes) if is_zstd else upload
                return await self._check_and_update(version, options, weights, folder, arrived)
        finally:
            # Of no use any more, whatever became of it: bad weights are bad when they are sent again.
            self._version_store.drop_upload(version)

    async def _load_checkpoint(self, version: int, checkpoint: str, options: PushOptions) -> PolicyUpdate:
        self._refuse_taken(version)
        self._refuse_if_busy(options)
        with self._version_store.workspace(version) as folder:
            weights = await asyncio.to_thread(self._fetched, checkpoint, options, folder)
            return await self._check_and_update(version, options, weights, folder, None)

    def _fetched(self, checkpoint: str, options: PushOptions, folder: Path) -> Path:
        source = fetched_checkpoint(checkpoint, self._settings.checkpoint_roots, folder / "fetched")
        weights = folder / "fetched.safetensors"
        write = write_adapter if options.kind == "adapter" else write_checkpoint
        write(source, weights)
        return weights

    async def _check_and_update(
        self, version: int, options: PushOptions, arrived: Path, folder: Path, upload_digest: str | None
    ) -> PolicyUpdate:
        info, weights = await asyncio.to_thread(self._weights.checked, version, options, arrived, folder, upload_digest)
        return await self._update(info, weights, options)

    async def _update(self, info: StoredVersion, weights: Path, options: PushOptions) -> PolicyUpdate:
        self._refuse_if_busy(options)
        async with self._lock:
            self._refuse_taken(info.version)
            if info.kind == "adapter":
                info = info.model_copy(update={"base": self._weights.due.full})
            self._updating_to = info.version
            try:
                await self._registry.forget_the_dead()
                await asyncio.to_thread(self._version_store.put, info, weights)
                payload = await asyncio.to_thread(self._weights.payload, info)
                replicas = await update_all(
                    self._fleet,
                    self._members_for(info),
                    payload,
                    SwapOptions(options.mode, options.reset_prefix_cache),
                    lambda: self._version_store.make_current(info.version),
                )
                self._last_update = PolicyUpdate(version=info.version, checksum=info.checksum, replicas=replicas)
            finally:
                self._updating_to = None
                if self._version_store.current() == info.version:
                    await self._settle()
                else:
                    self._version_store.remove(info.version)
        return self._last_update

    def _members_for(self, info: StoredVersion) -> list[RegisteredReplica]:
        """Whom an update reaches: an adapter only those that have its base; the others are brought up one by one."""
        members = self._registry.members
        if info.kind != "adapter":
            return members
        return [member for member in members if member.loaded.full == info.base]

    async def _settle(self) -> None:
        """What is current on disk is now what the replicas serve."""
        self._current = self._version_store.current()
        async with self._changed:
            self._changed.notify_all()
        self._version_store.drop_uploads_up_to(self._current, but=self._bringing.keys())
        self._senders = {version: sender for version, sender in self._senders.items() if version > self._current}
        self._weights.keep_newest(self._settings.keep_versions)
        await self._let_take_calls()

    # Weights that a trainer sends straight to the replicas.

    async def init_transfer(self, init_info: dict[str, Any]) -> int:
        """Lets every replica meet the trainer; returns how many processes take part, the trainer's one included.

        Raises:
            TransferRefused: the world size is another, or a replica could not.
        """
        return await self._in_background(self._init_transfer(init_info))

    async def _init_transfer(self, init_info: dict[str, Any]) -> int:
        async with self._lock:
            await self._registry.forget_the_dead()
            return await self._transfer.init(init_info)

    async def start_transfer(self, options: SwitchOptions) -> None:
        """Pauses every replica for weights to come; other updates wait until the transfer is finished or given up.

        Raises:
            TransferRefused: the replicas are others than those that met the trainer.
        """
        self._refuse_if_busy(options)
        await self._in_background(self._start_transfer(SwapOptions(options.mode, options.reset_prefix_cache)))

    async def _start_transfer(self, options: SwapOptions) -> None:
        await self._lock.acquire()
        await self._transfer.start(options, self._lock.release)

    async def update_transfer(self, update_info: Any) -> None:
        """Receives what the trainer sends meanwhile; raises `TransferRefused`."""
        await self._in_background(self._transfer.update(update_info))

    async def finish_transfer(self, version: int | None) -> PolicyUpdate:
        """What was sent is `version`, by default the next; raises `TransferRefused`, `VersionRefused`."""
        return await self._in_background(self._finish_transfer(version))

    async def _finish_transfer(self, version: int | None) -> PolicyUpdate:
        number = self._version_store.current() + 1 if version is None else version
        self._refuse_taken(number)

        def make_durable() -> None:
            self._version_store.put(StoredVersion(version=number, kind="transfer", created_at=datetime.now(UTC)), None)
            self._version_store.make_current(number)

        replicas = await self._transfer.finish(number, make_durable)
        self._last_update = PolicyUpdate(version=number, checksum=None, replicas=replicas)
        try:
            await self._settle()
        finally:
            self._lock.release()
        return self._last_update

    # What an update must not meet.

    def _refuse_taken(self, version: int) -> None:
        newest = max(self._current, self._updating_to or 0)
        if version <= newest:
            message = f"versions are numbered upward and {newest} is taken; the next is {newest + 1}"
            raise VersionRefused(FieldProblem(field="version", message=message, value=version))

    def _refuse_if_brought(self, version: int) -> None:
        if version in self._bringing:
            message = "all of it has arrived, and it is being checked and brought to the replicas"
            raise VersionRefused(FieldProblem(field="version", message=message, value=version))

    def _refuse_if_busy(self, options: SwitchOptions) -> None:
        if options.if_busy == "wait":
            return
        if self._updating_to is not None:
            busy = f"version {self._updating_to} is being brought to the replicas"
        elif self._transfer.is_under_way:
            busy = "a trainer is sending weights to the replicas"
        else:
            return
        message = f"{busy}; wait for it, or say if_busy=wait"
        raise UpdateUnderWay(FieldProblem(field="if_busy", message=message, value="refuse"))

    async def _current_when(self, is_so: Callable[[], bool], wait_s: float) -> int:
        """The current version once `is_so`, or after `wait_s`."""
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(is_so)
        except TimeoutError:
            return self._current
        return self._current

    async def _in_background(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Carries `work` to its end, also where nobody waits for it any more."""
        return await asyncio.shield(self._begin(work))

    def _begin(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def policy_folder(settings: PolicySettings) -> Path:
    return Path(settings.folder).expanduser() if settings.folder else cluster_weights_folder() / "policy"


def unpacked(packed: Path, folder: Path, most_bytes: int) -> Path:
    weights = folder / "unpacked.safetensors"
    unpack_zstd(packed, weights, most_bytes)
    return weights
