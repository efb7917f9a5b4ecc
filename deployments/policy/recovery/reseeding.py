"""Weights that the policy store has lost are read back from replicas that still have their file.

Guarantee: a file becomes a version's weights only if it has the checksum that the version is known by.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from deployments.policy.nodes.file_fetch import WeightsNotFetched, fetch_file
from deployments.policy.nodes.weights_source import WeightsSource
from deployments.policy.replicas.commands import StoredFile, StoredKind, VersionPayload
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
    """

    def __init__(
        self,
        registry: ReplicaRegistry,
        versions: PolicyVersions,
        store: VersionStore,
        source_of: Callable[[str], WeightsSource],
    ) -> None:
        self._registry = registry
        self._versions = versions
        self._store = store
        self._source_of = source_of
        self._one_at_a_time = asyncio.Lock()

    async def reseed(self) -> bool:
        """Reads what the store lacks of the weights that replicas should hold; returns whether it has all of them."""
        async with self._one_at_a_time:
            desired = self._versions.desired
            for version in sorted({desired.full, desired.version}):
                if not self._versions.has_weights(version) and not await self._reseeded(version):
                    return False
            return True

    async def _reseeded(self, version: int) -> bool:
        info = self._versions.stored(version)
        extra = {"version": version}
        if info is None or info.checksum is None:
            return False
        try:
            with self._store.workspace(version) as folder:
                await self._read(info, folder / "read.safetensors")
                await asyncio.to_thread(self._store.add_weights, version, folder / "read.safetensors")
        except (WeightsNotFetched, OSError) as failure:
            logger.warning("The policy store lacks the weights of version %d: %s", version, failure, extra=extra)
            return False
        logger.info("The policy store has the weights of version %d back from replicas.", version, extra=extra)
        return True

    async def _read(self, info: StoredVersion, path: Path) -> None:
        checksum = str(info.checksum)
        kind: StoredKind = "adapter" if info.kind == "adapter" else "full"
        payload = VersionPayload(info.version, kind, info.size_bytes, checksum, NOWHERE)
        descriptor = await asyncio.to_thread(os.open, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            await fetch_file(payload, [self._source_of(holder) for holder in self._holders(info.version)], descriptor)
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


def checksum_of(path: Path) -> str | None:
    try:
        return file_checksum(path)
    except NotSafetensors:
        return None
