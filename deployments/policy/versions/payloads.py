"""What a replica lacks, and where it gets the bytes from. No bytes pass through here but those that replicas read."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from deployments.policy.failures import VersionUnknown
from deployments.policy.nodes.weights_source import read_range
from deployments.policy.replicas.commands import LoadedWeights, StoredFile, VersionPayload
from deployments.policy.replicas.replica_registry import ReplicaRegistry
from deployments.policy.versions.version_history import PolicyVersions
from deployments.policy.versions.version_store import StoredVersion
from rollout_client.problem_contract import FieldProblem


class Payloads:
    """
    Args:
        node_id: of the policy store's node.
        copy_to_nodes: other nodes fetch a version even if they can read the folder of the store.
    """

    def __init__(
        self, versions: PolicyVersions, registry: ReplicaRegistry, node_id: str, copy_to_nodes: bool = False
    ) -> None:
        self._versions = versions
        self._registry = registry
        self._node_id = node_id
        self._copy_to_nodes = copy_to_nodes

    def can_complete(self, loaded: LoadedWeights) -> bool:
        """Whether the service has the weights that a replica which holds `loaded` lacks.

        Only replicas have those that a trainer sent them, and those that the store has lost.
        """
        return all(map(self._versions.has_weights, lacking(loaded, self._versions.desired)))

    @property
    def needed(self) -> set[int]:
        """Versions whose bytes a replica may still ask for."""
        desired = self._versions.desired
        needed = {desired.full, desired.version, *self._registry.loading}
        return needed if self._versions.updating_to is None else needed | {self._versions.updating_to}

    async def missing(self, loaded: LoadedWeights) -> Sequence[VersionPayload]:
        """What a replica that holds `loaded` has to load, in this order, to hold what is desired.

        Empty if it holds it, or if the service does not have it.
        """
        if not self.can_complete(loaded):
            return []
        return [await self.payload(number) for number in lacking(loaded, self._versions.desired)]

    async def payload(self, version: int) -> VersionPayload:
        """Raises what the file system raises, and `WeightsRefused` for an initial checkpoint that cannot be read."""
        file, checksum, size_bytes = await asyncio.to_thread(self._stored_file, version)
        info = self._versions.info(version)
        is_adapter = isinstance(info, StoredVersion) and info.kind == "adapter"
        return VersionPayload(
            version=version,
            kind="adapter" if is_adapter else "full",
            size_bytes=size_bytes,
            checksum=checksum,
            file=file,
            holders=tuple(self._holders(version)),
            keep=frozenset(self.needed | {version}),
            adapter_config=info.adapter_config if isinstance(info, StoredVersion) else None,
            record=self._versions.record(version),
        )

    async def read(self, version: int, checksum: str, offset: int, count: int) -> bytes:
        """Bytes of a version's file, for replicas of other nodes.

        Raises:
            VersionUnknown: it is not stored, or no longer, or has another checksum.
        """
        try:
            path = await asyncio.to_thread(self._path_of, version, checksum)
            return await asyncio.to_thread(read_range, path, offset, count)
        except FileNotFoundError as error:
            raise unknown(version) from error

    def _path_of(self, version: int, checksum: str) -> Path:
        if self._versions.checksum(version) != checksum:
            raise unknown(version)
        return self._versions.file(version)

    def _stored_file(self, version: int) -> tuple[StoredFile, str, int]:
        path = self._versions.file(version)
        found = path.stat()
        stored = StoredFile(str(path), self._node_id, found.st_ino, found.st_mtime_ns, self._copy_to_nodes)
        return stored, self._versions.checksum(version), found.st_size

    def _holders(self, version: int) -> list[str]:
        """None of the initial version, which every engine loads from the model's own checkpoint."""
        return [
            replica.replica_id
            for replica in self._registry.replicas
            if version and replica.accepts_requests and version in (replica.loaded.full, replica.loaded.adapter)
        ]


def lacking(loaded: LoadedWeights, desired: LoadedWeights) -> list[int]:
    """The versions to load, in this order, to get from `loaded` to `desired`.

    An adapter cannot be taken off, so that full weights alone are loaded anew.
    """
    if loaded == desired:
        return []
    if desired.adapter is None:
        return [desired.full]
    return [desired.adapter] if loaded.full == desired.full else [desired.full, desired.adapter]


def unknown(version: int) -> VersionUnknown:
    return VersionUnknown(FieldProblem(field="version", message="it is not stored here, or no longer", value=version))
