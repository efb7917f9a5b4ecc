"""Admission of replicas that register: one loads what it lacks, or the store takes over what the replica has.

A store whose folder was lost, or is older than what replicas serve, does not take them back, and reads the weights that
it lacks from the replicas that have their file.

| the replica holds | its state | what follows |
| --- | --- | --- |
| no version, or those that the store knows | `KNOWN` | it loads what it lacks |
| a version above the current one, on trial | `KNOWN` | it goes back: no rollout has tokens of the version |
| a version that was refused, or under way when the store died | `TRIED` | it goes back; the number is not given again |
| a version above the current one | `AHEAD` | the store takes the version over |
| other weights under a number that the store knows, or those of another run | `DIFFERENT` | it is replaced |

Two contents of a version are the same if they have the same checksum, or, where one is not known, as after a transfer,
were made at the same time. Of what is not known nothing is said: it counts as the same.

Guarantees: numbers only go up; a number never means two things; a version that a replica serves is current, on disk,
before any other replica loads it; while a store with an empty folder waits for replicas of its predecessor
(`settle_s`), no replica that lacks their version accepts requests, and no version is pushed; a file becomes a version's
weights only if it has the checksum that the version is known by.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from deployments.policy.policies import PolicyRegistry
from deployments.policy.replicas.commands import (
    ReplicaRegistration,
    SavedWeights,
    StoredFile,
    StoredKind,
    VersionPayload,
)
from deployments.policy.replicas.file_fetch import WeightsNotFetched, WeightsSource, fetch_file
from deployments.policy.replicas.node_weights import is_readable_here
from deployments.policy.replicas.replica_registry import RegisteredReplica, ReplicaRegistry
from deployments.policy.update.activation import ReplicaInitializer, VersionActivation
from deployments.policy.update.update_lock import UpdateLock
from deployments.policy.versions.version_history import VersionHistory
from deployments.policy.versions.version_store import KnownVersions, StoredVersion
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.safetensors_file import NotSafetensors

logger = logging.getLogger("rollout_service.policy")
NO_FILE = StoredFile(path="", node_id="", inode=0, modified_ns=0)


class WeightReadback:
    """Reads weights that the store lacks back from the replicas that have them.

    Args:
        source_of: where a replica's files are read, by the replica's id.
        node_id: of the policy store's node.
    """

    def __init__(
        self,
        registry: ReplicaRegistry,
        versions: VersionHistory,
        source_of: Callable[[str], WeightsSource],
        node_id: str,
    ) -> None:
        self._registry = registry
        self._versions = versions
        self._source_of = source_of
        self._node_id = node_id
        self._one_at_a_time = asyncio.Lock()

    async def read_back(self) -> bool:
        """Reads what the store lacks of the weights that replicas should hold; returns whether it has all of them."""
        async with self._one_at_a_time:
            desired = self._versions.desired
            for version in sorted({desired.full, desired.version}):
                if self._versions.has_weights(version):
                    continue
                info = self._versions.store.find(version)
                if info is None or not await self._stored_from(info, self._holders(version)):
                    return False
            return True

    async def take(self, version: int, saved: SavedWeights, holder: str) -> bool:
        """Gets the weights of a version that only engines had, and that a replica has saved; returns whether it could.

        Args:
            holder: id of the replica.
        """
        async with self._one_at_a_time:
            info = self._versions.store.find(version)
            if info is None:
                return False
            described = info.model_copy(update={"checksum": saved.checksum, "size_bytes": saved.size_bytes})
            return await self._stored_from(described, [holder], saved.file)

    async def _stored_from(self, info: StoredVersion, holders: Sequence[str], file: StoredFile = NO_FILE) -> bool:
        """Whether the weights that `info` describes could be stored; `file` is where one of the holders has them."""
        version = info.version
        extra = {"version": version}
        if info.checksum is None:
            return False
        try:
            with self._versions.store.workspace(version) as folder:
                await self._read(info, holders, file, folder / "read.safetensors")
                await asyncio.to_thread(self._versions.store.add_weights, version, folder / "read.safetensors", info)
        except (WeightsNotFetched, OSError) as failure:
            logger.warning("The policy store lacks the weights of version %d: %s", version, failure, extra=extra)
            return False
        logger.info("The policy store has the weights of version %d from replicas.", version, extra=extra)
        return True

    async def _read(self, info: StoredVersion, holders: Sequence[str], file: StoredFile, path: Path) -> None:
        checksum = str(info.checksum)
        kind: StoredKind = "adapter" if info.kind == "adapter" else "full"
        payload = VersionPayload(info.version, kind, info.size_bytes, checksum, file)
        if not await asyncio.to_thread(is_linked, payload, self._node_id, path):
            descriptor = await asyncio.to_thread(os.open, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                await fetch_file(payload, list(map(self._source_of, holders)), descriptor)
            finally:
                os.close(descriptor)
        if await asyncio.to_thread(checksum_of, path) != checksum:
            raise WeightsNotFetched("what was read from replicas has another checksum")

    def _holders(self, version: int) -> list[str]:
        return [
            replica.replica_id
            for replica in self._registry.replicas
            if version in (replica.loaded.full, replica.loaded.adapter)
        ]


def is_linked(payload: VersionPayload, node_id: str, path: Path) -> bool:
    """Makes `path` a hard link of the payload's file, if it is on a file system of this node."""
    if not is_readable_here(payload.file, payload.size_bytes, node_id):
        return False
    try:
        os.link(payload.file.path, path)
    except OSError:
        return False
    return True


def checksum_of(path: Path) -> str | None:
    try:
        return file_checksum(path)
    except NotSafetensors:
        return None


class RegistrationState(Enum):
    KNOWN = "known"
    TRIED = "tried"
    AHEAD = "ahead"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class RegistrationVerdict:
    state: RegistrationState
    reason: str = ""
    """Why it is `DIFFERENT`."""


def reported_versions(registration: ReplicaRegistration) -> list[StoredVersion]:
    """The versions that the replica has loaded, as it knows them: full weights, then the adapter. Without version 0.

    Of a version without a record only the number is known, as after a transfer.
    """
    loaded = registration.loaded
    held = []
    for version in (loaded.full, loaded.adapter):
        if version:
            record = registration.records.get(version)
            held.append(unrecorded(registration, version) if record is None else read_record(record))
    return held


def read_record(record: str) -> StoredVersion:
    return StoredVersion.model_validate_json(record)


def unrecorded(registration: ReplicaRegistration, version: int) -> StoredVersion:
    loaded = registration.loaded
    now = datetime.now(UTC)
    if version == loaded.adapter:
        return StoredVersion(version=version, kind="adapter", base=loaded.full, created_at=now)
    return StoredVersion(version=version, kind="transfer", created_at=now)


def classify(registration: ReplicaRegistration, known: KnownVersions) -> RegistrationVerdict:
    held = [version for version in reported_versions(registration) if version.version in registration.records]
    for version in held:
        if reason := difference(version, known):
            return RegistrationVerdict(RegistrationState.DIFFERENT, reason)
    newest = registration.loaded.version
    if newest <= known.current or registration.is_on_trial:
        return RegistrationVerdict(RegistrationState.KNOWN)
    return RegistrationVerdict(RegistrationState.TRIED if newest in known.tried else RegistrationState.AHEAD)


def difference(held: StoredVersion, known: KnownVersions) -> str | None:
    """Why the version cannot be what the store knows under its number."""
    if held.run not in (None, known.run):
        return f"it holds version {held.version} of the run {held.run}, and this is the run {known.run}"
    for versions in (known.stored, known.tried):
        other = versions.get(held.version)
        if other is not None and not are_same(held, other):
            return f"it holds other weights as version {held.version} than the policy store knows under this number"
    return None


def are_same(one: StoredVersion, other: StoredVersion) -> bool:
    if one.checksum is None or other.checksum is None:
        return one.created_at == other.created_at
    return one.checksum == other.checksum


SETTLE_S = 5.0
"""Replicas register again half a second after they have lost the store. Engines take longer than this to start, so a
service that starts for the first time loses no time."""


class Recovery:
    """Admits the replicas that register.

    Args:
        settle_s: how long a store with an empty folder waits for replicas that are ahead of it.
    """

    def __init__(
        self,
        registry: ReplicaRegistry,
        policies: PolicyRegistry,
        activation: VersionActivation,
        initializer: ReplicaInitializer,
        update_lock: UpdateLock,
        readback: WeightReadback,
        tasks: BackgroundTasks,
        settle_s: float,
    ) -> None:
        self._registry = registry
        self._policy = policies.unnamed
        self._versions = versions = policies.unnamed.versions
        self._activation = activation
        self._initializer = initializer
        self._update_lock = update_lock
        self._readback = readback
        self._tasks = tasks
        self._settled = asyncio.Event()
        if settle_s > 0 and not versions.has_any:
            asyncio.get_running_loop().call_later(settle_s, self._settled.set)
        else:
            self._settled.set()

    async def settled(self) -> None:
        """Returns once it is known whether replicas are ahead of a store that has started with an empty folder."""
        await self._settled.wait()

    async def admit(self, replica: RegisteredReplica) -> None:
        """Gives the replica what it lacks, takes over what it has, or replaces it.

        Where the store cannot write what it takes over, the replica has to register again.
        """
        try:
            is_admitted = await self._is_admitted(replica)
        except OSError as error:
            extra = {"replica_id": replica.replica_id}
            logger.error("The versions of a replica cannot be taken over.", exc_info=error, extra=extra)
            self._registry.forget(replica.replica_id, str(error))
            return
        if is_admitted:
            await self._initializer.initialize(replica)

    async def _is_admitted(self, replica: RegisteredReplica) -> bool:
        verdict = self._verdict_on(replica)
        if verdict.state is RegistrationState.AHEAD:
            async with self._update_lock.lease("the versions of a replica that is ahead are being taken over"):
                verdict = self._verdict_on(replica)
                if verdict.state is RegistrationState.AHEAD:
                    await self._take_over(replica)
        elif verdict.state is RegistrationState.KNOWN:
            await self._settled.wait()
        if verdict.state is RegistrationState.DIFFERENT:
            extra = {"replica_id": replica.replica_id}
            logger.error("A generator replica has to be replaced: %s.", verdict.reason, extra=extra)
            self._registry.replace_if_registered(replica, verdict.reason)
            return False
        if verdict.state is RegistrationState.TRIED:
            self._versions.store.keep_tried(replica.loaded.version)
        if self._lacks_weights_of(replica):
            self._tasks.start(self._read_back())
        return True

    def _verdict_on(self, replica: RegisteredReplica) -> RegistrationVerdict:
        return classify(replica.registration, self._versions.known())

    async def _take_over(self, replica: RegisteredReplica) -> None:
        """The caller holds the update lease."""
        newest = replica.loaded.version
        extra = {"replica_id": replica.replica_id, "version": newest}
        logger.warning(
            "Version %d of a replica is newer than what the policy store has: the store goes on with it.",
            newest,
            extra=extra,
        )
        await asyncio.to_thread(self._versions.take_over, reported_versions(replica.registration))
        await self._activation.activate(self._policy)
        self._settled.set()

    def _lacks_weights_of(self, replica: RegisteredReplica) -> bool:
        return replica.loaded == self._versions.desired and not self._versions.has_desired

    async def take_saved(self, version: int, saved: SavedWeights, holder: str) -> bool:
        """Gets the weights of a version that only engines had, and that the replica `holder` has saved; returns whether
        it could. They are given to the replicas that lack them."""
        if not await self._readback.take(version, saved, holder):
            return False
        self._activation.remove_old_versions(self._policy)
        # Not a part of what the next transfer waits for: it holds the update lease then.
        self._tasks.start(self._give_saved())
        return True

    async def _give_saved(self) -> None:
        async with self._update_lock.lease():
            if self._versions.has_desired:
                await self._read_back()

    async def _read_back(self) -> None:
        """Reads lost weights back, and gives them to the replicas that lack them; where that fails, replicas that serve
        an older version are replaced, and their successors wait for the next one."""
        has_weights = await self._readback.read_back()
        desired = self._versions.desired
        for other in self._registry.replicas:
            if other.loaded == desired:
                continue
            if has_weights and not other.is_starting:
                other.is_starting = True
                self._tasks.start(self._initializer.initialize(other))
            elif not has_weights and other.loaded.version:
                reason = f"it serves an older version than {desired.version}, whose weights only other replicas have"
                self._registry.replace_if_registered(other, reason, desired.version)
