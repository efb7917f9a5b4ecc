"""Weights that the policy store has lost, or never had, are read from replicas that have their file.

Guarantee: a file becomes a version's weights only if it has the checksum that the version is known by.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from deployments.policy.nodes.weights_source import WeightsSource
from deployments.policy.replicas.commands import SavedWeights, StoredFile, StoredKind, VersionPayload
from deployments.policy.replicas.file_fetch import WeightsNotFetched, fetch_file
from deployments.policy.replicas.node_weights import can_be_mapped
from deployments.policy.replicas.replica_registry import ReplicaRegistry
from deployments.policy.versions.version_history import PolicyVersions
from deployments.policy.versions.version_store import StoredVersion, VersionStore
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.safetensors_file import NotSafetensors

logger = logging.getLogger("rollout_service.policy")
NOWHERE = StoredFile(path="", node_id="", inode=0, modified_ns=0)


class Reseeding:
    """
    Args:
        source_of: where a replica's files are read, by the replica's id.
        node_id: of the policy store's node.
    """

    def __init__(
        self,
        registry: ReplicaRegistry,
        versions: PolicyVersions,
        store: VersionStore,
        source_of: Callable[[str], WeightsSource],
        node_id: str,
    ) -> None:
        self._registry = registry
        self._versions = versions
        self._store = store
        self._source_of = source_of
        self._node_id = node_id
        self._one_at_a_time = asyncio.Lock()

    async def reseed(self) -> bool:
        """Reads what the store lacks of the weights that replicas should hold; returns whether it has all of them."""
        async with self._one_at_a_time:
            desired = self._versions.desired
            for version in sorted({desired.full, desired.version}):
                if self._versions.has_weights(version):
                    continue
                info = self._versions.stored(version)
                if info is None or not await self._reseeded(info, self._holders(version)):
                    return False
            return True

    async def take(self, version: int, saved: SavedWeights, holder: str) -> bool:
        """Gets the weights of a version that only engines had, and that a replica has saved; returns whether it could.

        Args:
            holder: id of the replica.
        """
        async with self._one_at_a_time:
            info = self._versions.stored(version)
            if info is None:
                return False
            described = info.model_copy(update={"checksum": saved.checksum, "size_bytes": saved.size_bytes})
            return await self._reseeded(described, [holder], saved.file)

    async def _reseeded(self, info: StoredVersion, holders: Sequence[str], file: StoredFile = NOWHERE) -> bool:
        """Whether the weights that `info` describes could be stored; `file` is where one of the holders has them."""
        version = info.version
        extra = {"version": version}
        if info.checksum is None:
            return False
        try:
            with self._store.workspace(version) as folder:
                await self._read(info, holders, file, folder / "read.safetensors")
                await asyncio.to_thread(self._store.add_weights, version, folder / "read.safetensors", info)
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
    if not can_be_mapped(payload.file, payload.size_bytes, node_id):
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
