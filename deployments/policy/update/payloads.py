"""Payloads for replicas: what one lacks, and where its bytes are. Only bytes that replicas read pass through here."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from deployments.policy.failures import VersionUnknown
from deployments.policy.policies import PolicyRegistry
from deployments.policy.policy import Policy
from deployments.policy.replicas.commands import DeltaPayload, LoadedWeights, StoredFile, VersionPayload
from deployments.policy.replicas.file_fetch import read_range
from deployments.policy.replicas.replica_registry import ReplicaRegistry
from deployments.policy.versions.version_store import StoredVersion


class Payloads:
    """Those of the policy without a name, unless it is said otherwise.

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
        self._node_id = node_id
        self._copy_to_nodes = copy_to_nodes

    def can_complete(self, loaded: LoadedWeights) -> bool:
        """Whether the service has the weights that a replica which holds `loaded` lacks.

        Only replicas have those that a trainer sent them, and those that the store has lost.
        """
        return all(map(self._versions.has_weights, versions_to_load(loaded, self._versions.desired)))

    @property
    def pinned(self) -> set[int]:
        """Versions whose bytes a replica may still ask for."""
        desired = self._versions.desired
        needed = {desired.full, desired.version, *self._registry.loading}
        return needed if self._versions.updating_to is None else needed | {self._versions.updating_to}

    async def to_load(self, loaded: LoadedWeights) -> Sequence[VersionPayload]:
        """The versions that a replica which holds `loaded` has to load, in this order, to hold what is desired.

        Empty if it holds it, or if the service does not have it.
        """
        if not self.can_complete(loaded):
            return []
        return [await self.payload(number, loaded.full) for number in versions_to_load(loaded, self._versions.desired)]

    async def all_payloads(self) -> Sequence[VersionPayload]:
        """The versions that a replica without a whole one has to load, in this order; empty if the service lacks one.

        Raises:
            VersionUnknown, WeightsRefused: as `DeltaChains.file` does.
            OSError: a file cannot be read.
        """
        desired = self._versions.desired
        numbers = [desired.full] if desired.adapter is None else [desired.full, desired.adapter]
        if not all(map(self._versions.has_weights, numbers)):
            return []
        for number in numbers:
            await asyncio.to_thread(self._versions.file, number)
        return [await self.payload(number) for number in numbers]

    async def materialize(self, loaded: LoadedWeights) -> None:
        """Makes the full weights that a replica which holds `loaded` lacks, where it cannot use the deltas of them.

        Raises:
            VersionUnknown, WeightsRefused: as `DeltaChains.file` does.
        """
        if self.can_complete(loaded):
            for number in versions_to_load(loaded, self._versions.desired):
                await asyncio.to_thread(self._make_file, number, loaded.full)

    async def payload(self, version: int, held: int | None = None) -> VersionPayload:
        """One version.

        Args:
            held: the full weights that the replica holds. If the version is stored as a delta of them, the replica gets
                the delta.

        Raises:
            WeightsRefused: the initial checkpoint cannot be read.
            OSError: a file cannot be read.
        """
        file, checksum, size_bytes, delta = await asyncio.to_thread(self._files_of, version, held)
        info = self._versions.info(version)
        is_adapter = isinstance(info, StoredVersion) and info.kind == "adapter"
        return VersionPayload(
            version=version,
            kind="adapter" if is_adapter else "full",
            size_bytes=size_bytes,
            checksum=checksum,
            file=file,
            holders=tuple(self._holders(version)),
            keep=frozenset(self.pinned | {version} | (set() if delta is None else {delta.base})),
            adapter_config=info.adapter_config if isinstance(info, StoredVersion) else None,
            delta=delta,
            record=self._versions.record(version),
        )

    def adapters(
        self, policy: Policy | None = None, instead: StoredVersion | None = None
    ) -> tuple[VersionPayload, ...]:
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
                file=self._stored(each.weights_of(info)),
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
        if (adapter := self._policies.path_of(version, checksum)) is not None:
            return adapter
        if self._versions.checksum(version) == checksum:
            return self._versions.file(version)
        info = self._versions.store.find(version)
        delta = None if info is None or info.delta_checksum != checksum else self._versions.delta_file(info)
        if delta is None:
            raise VersionUnknown.not_stored(version)
        return delta

    def _make_file(self, version: int, held: int) -> None:
        info = self._versions.info(version)
        if not isinstance(info, StoredVersion) or self._delta_of(info, held) is None:
            self._versions.file(version)

    def _files_of(self, version: int, held: int | None) -> tuple[StoredFile, str, int, DeltaPayload | None]:
        info = self._versions.info(version)
        path = self._versions.place(version)
        delta = self._delta_of(info, held) if isinstance(info, StoredVersion) else None
        size_bytes = path.stat().st_size if path.exists() else info.size_bytes
        return self._stored(path), self._versions.checksum(version), size_bytes, delta

    def _delta_of(self, info: StoredVersion, held: int | None) -> DeltaPayload | None:
        path = self._versions.delta_file(info)
        if path is None or held is None or info.base != held or not self._versions.has_weights(held):
            return None
        base_file = self._stored(self._versions.place(held))
        base_checksum = self._versions.checksum(held)
        size_bytes, checksum = path.stat().st_size, str(info.delta_checksum)
        return DeltaPayload(held, base_checksum, base_file, self._stored(path), size_bytes, checksum)

    def _stored(self, path: Path) -> StoredFile:
        """The file may not exist yet."""
        try:
            found = path.stat()
        except FileNotFoundError:
            return StoredFile(str(path), self._node_id, inode=0, modified_ns=0, is_copied=self._copy_to_nodes)
        return StoredFile(str(path), self._node_id, found.st_ino, found.st_mtime_ns, self._copy_to_nodes)

    def _holders(self, version: int) -> list[str]:
        """None of the initial version, which every engine loads from the model's own checkpoint."""
        return [
            replica.replica_id
            for replica in self._registry.replicas
            if version and replica.accepts_requests and version in (replica.loaded.full, replica.loaded.adapter)
        ]


def versions_to_load(loaded: LoadedWeights, desired: LoadedWeights) -> list[int]:
    """The versions to load, in this order, to get from `loaded` to `desired`.

    An adapter cannot be taken off, so that full weights alone are loaded again.
    """
    if loaded == desired:
        return []
    if desired.adapter is None:
        return [desired.full]
    return [desired.adapter] if loaded.full == desired.full else [desired.full, desired.adapter]
