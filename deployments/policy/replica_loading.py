"""Replicas get the current version before they accept requests, and again when they have lost it.

Payloads say what a replica lacks, and where its bytes are; only bytes that replicas read pass through the store.
Guarantees: a replica accepts requests only once it holds what every replica should hold, the adapters of named policies
included; one that holds other weights under a number that the store knows is replaced, and a number that a replica has
is not given to other weights. Replicas that start load at the same time, and updates wait only for the second load of a
replica that one of them has overtaken.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deployments.policy.cluster import read_range
from deployments.policy.commands import (
    AbandonTransfer,
    AcceptRequests,
    DeltaPayload,
    LoadedWeights,
    ReplicaRegistration,
    SetAdapters,
    StoredFile,
    VersionPayload,
)
from deployments.policy.failures import PolicyFailure, VersionUnknown
from deployments.policy.policies import Policy, PolicyRegistry
from deployments.policy.replica_registry import RegisteredReplica, ReplicaRegistry, error_of
from deployments.policy.versions import Version

logger = logging.getLogger("rollout_service.policy")


class ReplicaLoading:
    """Gives replicas what every replica should hold. Payloads are of the policy without a name, unless it is said.

    Args:
        node_id: of the policy store's node.
        copy_to_nodes: other nodes fetch a version even if they can read the folder of the store.
    """

    def __init__(
        self, policies: PolicyRegistry, registry: ReplicaRegistry, node_id: str, copy_to_nodes: bool = False
    ) -> None:
        self._policies = policies
        self._versions = policies.unnamed.versions
        self._registry = registry
        self._update_lock = registry.update_lock
        self._node_id = node_id
        self._copy_to_nodes = copy_to_nodes

    def _can_complete(self, loaded: LoadedWeights | None) -> bool:
        """Whether the service has the weights that a replica which holds `loaded` lacks.

        Only replicas have those that a trainer sent them.
        """
        return all(map(self._versions.has_weights, _versions_to_load(loaded, self._versions.desired)))

    @property
    def pinned(self) -> set[int]:
        """Versions whose bytes a replica may still ask for."""
        desired = self._versions.desired
        needed = {desired.full, desired.version, *self._registry.loading}
        return needed if self._versions.updating_to is None else needed | {self._versions.updating_to}

    async def to_load(self, loaded: LoadedWeights | None) -> list[VersionPayload]:
        """The versions that a replica has to load, in this order, to hold what is desired.

        Empty if it holds it, or if the service does not have it.

        Args:
            loaded: what the replica holds; `None` if its weights may be of two versions.

        Raises:
            VersionUnknown, WeightsRefused: as `Versions.file` does.
            OSError: a file cannot be read.
        """
        numbers = _versions_to_load(loaded, self._versions.desired) if self._can_complete(loaded) else []
        return [await self.payload(number) for number in numbers]

    async def payload(self, version: int, is_delta: bool = False) -> VersionPayload:
        """One version.

        Args:
            is_delta: for replicas that hold the base of a version that came as a delta: its full weights are not
                written before.

        Raises:
            VersionUnknown, WeightsRefused: as `Versions.file` does.
            OSError: a file cannot be read.
        """
        return await asyncio.to_thread(self._payload, version, self.pinned, is_delta)

    def _payload(self, version: int, pinned: set[int], is_delta: bool = False) -> VersionPayload:
        versions, info = self._versions, self._versions.find(version)
        is_delta = is_delta and versions.is_delta(version)
        path = versions.delta(version) if is_delta else versions.file(version)
        payload = VersionPayload(
            version=version,
            kind="adapter" if info is not None and info.kind == "adapter" else "full",
            size_bytes=path.stat().st_size,
            checksum=versions.checksum(version),
            file=self._stored(path),
            keep=frozenset(pinned | {version}),
            adapter_config=None if info is None else info.adapter_config,
            key=None if info is None else info.key,
        )
        if info is None or not is_delta:
            return payload
        changes = replace(payload, checksum=str(info.delta_checksum))
        delta = DeltaPayload(self._payload(info.base or 0, pinned), changes)
        return replace(payload, size_bytes=info.size_bytes, delta=delta)

    def adapters(self, policy: Policy | None = None, instead: Version | None = None) -> tuple[VersionPayload, ...]:
        """The current version of each named policy that has one; of `policy` the version `instead`.

        Call it from a thread.
        """
        served = ((each, instead if each is policy else each.served) for each in self._policies.named.values())
        return tuple(
            VersionPayload(
                version=info.version,
                kind="adapter",
                size_bytes=info.size_bytes,
                checksum=str(info.checksum),
                file=self._stored(each.versions.weights(info.version)),
                adapter_config=info.adapter_config,
                name=each.name,
                base=info.base,
            )
            for each, info in served
            if info is not None
        )

    async def read(self, version: int, checksum: str, offset: int, count: int) -> bytes:
        """Bytes of the file of a version of any policy, for replicas of other nodes.

        Raises:
            VersionUnknown: it is not stored, or no longer, or has another checksum.
        """
        try:
            path = await asyncio.to_thread(self._path_of, version, checksum)
            return await asyncio.to_thread(read_range, path, offset, count)
        except FileNotFoundError as error:
            raise VersionUnknown.not_stored(version) from error

    def _path_of(self, version: int, checksum: str) -> Path:
        for policy in self._policies.named.values():
            if policy.served is not None and (policy.served.version, policy.served.checksum) == (version, checksum):
                return policy.versions.weights(version)
        if self._versions.checksum(version) == checksum:
            return self._versions.file(version)
        if version and self._versions.info(version).delta_checksum == checksum:
            return self._versions.delta(version)
        raise VersionUnknown.not_stored(version)

    def _stored(self, path: Path) -> StoredFile:
        found = path.stat()
        return StoredFile(str(path), self._node_id, found.st_ino, found.st_mtime_ns, self._copy_to_nodes)

    async def admit(self, replica: RegisteredReplica) -> None:
        """Loads what a replica that has registered lacks, or replaces it.

        If a trainer sent the current weights straight to the replicas, and they were not saved, the service does not
        have them, and the replica waits for the next version.
        """
        if (reason := self._difference(replica.registration)) is not None:
            extra = {"replica_id": replica.replica_id}
            logger.error("A generator replica has to be replaced: %s.", reason, extra=extra)
            self._registry.replace_if_registered(replica, reason)
            return
        await self.load(replica)

    def _difference(self, registration: ReplicaRegistration) -> str | None:
        """Why what it holds cannot be what the store knows under the same number; notes the other numbers it has."""
        for version in (registration.loaded.full, registration.loaded.adapter):
            known = self._versions.find(version or 0)
            if known is not None and registration.keys.get(known.version) != known.key:
                return f"it holds other weights as version {version} than the policy store knows under this number"
        if not registration.is_on_trial:
            self._versions.take(registration.loaded.version)
        self._policies.take_served(registration.named)
        return None

    async def load(self, replica: RegisteredReplica) -> None:
        """Loads what the replica lacks, or replaces it. The replica's `is_starting` is true until then."""
        try:
            await self._load_and_join(replica)
        except Exception as error:
            extra = {"replica_id": replica.replica_id}
            logger.warning("The current weights could not be given to a replica.", exc_info=error, extra=extra)
            self._registry.replace_if_registered(replica, str(error))

    async def load_waiting(self) -> None:
        """Loads the desired weights into the replicas that waited until the service had them."""
        async with self._update_lock.lease():
            waiting = [replica for replica in self._registry.started if replica.loaded != self._versions.desired]
            for replica in waiting:
                replica.is_starting = True
        await asyncio.gather(*map(self.load, waiting))

    async def _load_and_join(self, replica: RegisteredReplica) -> None:
        if not await self._load_missing(replica):
            return
        async with self._update_lock.lease():
            # Nothing is missing unless an update has come in between.
            if await self._load_missing(replica):
                await self._join(replica)

    async def _load_missing(self, replica: RegisteredReplica) -> bool:
        """Returns false if the replica failed."""
        desired = self._versions.desired
        replica.loading = (desired.full, desired.version)
        try:
            return await self._registry.load(replica, await self.to_load(replica.loaded))
        finally:
            replica.loading = ()

    async def _join(self, replica: RegisteredReplica) -> None:
        """From now on the replica takes part in updates. The caller holds the update lease."""
        replica.is_starting = False
        if replica.loaded != self._versions.desired:
            version = self._versions.desired.version
            extra = {"replica_id": replica.replica_id, "version": version}
            logger.warning("A replica waits: only engines have the weights of version %d.", version, extra=extra)
        await self.start_accepting()

    async def start_accepting(self) -> None:
        """Tells every replica that holds the desired weights, and was not told yet, to accept requests.

        The caller holds the update lease.
        """
        desired = self._versions.desired
        ready = [
            replica for replica in self._registry.started if not replica.accepts_requests and replica.loaded == desired
        ]
        for replica in ready:
            replica.accepts_requests = True
        await self.set_adapters([replica for replica in ready if self._needs_adapters(replica)])
        for replica, result in (await self._registry.send_all(ready, AcceptRequests())).items():
            if (error := error_of(result)) is not None:
                self._registry.replace_if_registered(replica, error, desired.version)

    def _needs_adapters(self, replica: RegisteredReplica) -> bool:
        """Whether the replica has to be told which named policies it serves."""
        return bool(replica.registration.named) or any(policy.served for policy in self._policies.named.values())

    async def set_adapters(self, replicas: Sequence[RegisteredReplica]) -> None:
        """Lets the replicas serve exactly the named policies that are current; one that cannot is replaced.

        The caller holds the update lease.
        """
        payloads = await asyncio.to_thread(self.adapters)
        command = SetAdapters(payloads, self._registry.canary_timeout_s())
        results = await self._registry.send_all(replicas, command, sum(payload.size_bytes for payload in payloads))
        for replica, result in results.items():
            if (error := error_of(result)) is not None:
                self._registry.replace_if_registered(replica, error)

    async def go_back(
        self, replica: RegisteredReplica, held: LoadedWeights | None, abandon_timeout_s: float | None = None
    ) -> bool:
        """Lets a replica load what is current again; returns false if it failed, and is replaced.

        It is replaced, too, if only engines have the current weights, since a trainer sent them there. The caller holds
        the update lease.

        Args:
            held: what the replica holds; `None` if its weights may be of two versions.
            abandon_timeout_s: the replica lets go of a trainer whose transfer broke off first, in so many seconds.
        """
        version = self._versions.desired.version
        reason, payloads = None, list[VersionPayload]()
        if not self._can_complete(held):
            reason = f"it has to go back, and only engines had the weights of version {version}"
        try:
            payloads = await self.to_load(held)
        except (PolicyFailure, OSError) as failure:
            reason = f"it has to go back, and the weights of version {version} cannot be read: {failure}"
        if reason is None and abandon_timeout_s is not None:
            reason = error_of(await self._registry.send(replica, AbandonTransfer(), timeout_s=abandon_timeout_s))
        if reason is not None:
            self._registry.replace_if_registered(replica, reason, version)
            return False
        if not await self._registry.load(replica, payloads):
            return False
        if self._needs_adapters(replica):
            # A swap of full weights took the adapters of named policies off.
            await self.set_adapters([replica])
        return True


def _versions_to_load(loaded: LoadedWeights | None, desired: LoadedWeights) -> list[int]:
    """The versions to load, in this order, to get from `loaded` to `desired`.

    An adapter cannot be taken off, so that full weights alone are loaded again.
    """
    if loaded == desired:
        return []
    if desired.adapter is None:
        return [desired.full]
    return [desired.adapter] if loaded is not None and loaded.full == desired.full else [desired.full, desired.adapter]
