"""Weights that a trainer sent into the engines come into the policy store: one replica writes them while they arrive.

Guarantees: a transfer neither fails nor waits because its weights cannot be saved, the log says then who lacks them; no
transfer begins before those of the last one were saved, or could not be; a file becomes a version's weights only if it
has the checksum that its replica computed.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deployments.policy.commands import CommandReport, SavedWeights, SaveTransfer, VersionPayload
from deployments.policy.initial_version import InitialVersion
from deployments.policy.node_files import WeightsNotFetched, WeightsSource, fetch_file, is_readable_here
from deployments.policy.replica_registry import RegisteredReplica, ReplicaRegistry, error_of
from deployments.policy.update import Updates
from deployments.policy.versions import Version, Versions
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.safetensors_file import NotSafetensors

Layout = Mapping[str, tuple[str, Sequence[int]]]
logger = logging.getLogger("rollout_service.policy")


class TransferredWeights:
    """Lets a replica save what a trainer sent, and takes the file over.

    Args:
        source_of: where a replica's files are read, by the replica's id.
        node_id: of the policy store's node.
        is_on: whether anything is saved.
    """

    def __init__(
        self,
        registry: ReplicaRegistry,
        versions: Versions,
        initial: InitialVersion,
        updates: Updates,
        tasks: BackgroundTasks,
        source_of: Callable[[str], WeightsSource],
        node_id: str,
        is_on: bool,
    ) -> None:
        self._registry = registry
        self._versions = versions
        self._initial = initial
        self._updates = updates
        self._tasks = tasks
        self._source_of = source_of
        self._node_id = node_id
        self._is_on = is_on
        self._last: asyncio.Task[None] | None = None

    async def layouts(self, replicas: int) -> list[Layout | None]:
        """The layout that each replica is told to save: the first all tensors of the checkpoint, the others nothing."""
        nothing: list[Layout | None] = [None] * replicas
        if not self._is_on:
            return nothing
        try:
            layout = await self._initial.layout()
        except (OSError, ValueError) as failure:
            logger.warning("What a trainer sends is not saved: the model's checkpoint cannot be read: %s", failure)
            return nothing
        return [{name: (tensor.dtype, tensor.shape) for name, tensor in layout.tensors.items()}, *nothing[1:]]

    def start_saving(self, version: int, replica: RegisteredReplica) -> None:
        """Starts to save the version on `replica`, the first of those that took part in the transfer."""
        if self._is_on:
            self._last = self._tasks.start(self._save(version, replica))

    async def saved(self) -> None:
        """Returns when the last one has been saved, or could not be."""
        if self._last is not None:
            await asyncio.wait([self._last])

    async def _save(self, version: int, replica: RegisteredReplica) -> None:
        report = await self._registry.send(replica, SaveTransfer(version))
        reason = error_of(report)
        if reason is None and isinstance(report, CommandReport):
            reason = await self._taken(version, report.saved, replica.replica_id)
        if reason is not None:
            message = "Version %d stays in the engines alone, so that a replica that starts waits for the next: %s"
            logger.warning(message, version, reason, extra={"version": version})
        else:
            # Not a part of what the next transfer waits for: it holds the update lease then.
            self._tasks.start(self._updates.use_saved_weights())

    async def _taken(self, version: int, saved: SavedWeights | None, holder: str) -> str | None:
        """Gets the weights that the replica `holder` has saved; returns why it could not, if it could not."""
        info = self._versions.find(version)
        if saved is None or info is None:
            return "the replica saved nothing" if saved is None else "a newer version has taken its place"
        described = info.model_copy(update={"checksum": saved.checksum, "size_bytes": saved.size_bytes})
        try:
            with self._versions.workspace(version) as folder:
                await self._read(described, saved, holder, folder / "read.safetensors")
                await asyncio.to_thread(self._versions.add_weights, described, folder / "read.safetensors")
        except (WeightsNotFetched, OSError) as failure:
            return f"the policy store could not read them: {failure}"
        logger.info("The policy store has the weights of version %d.", version, extra={"version": version})
        return None

    async def _read(self, info: Version, saved: SavedWeights, holder: str, path: Path) -> None:
        payload = VersionPayload(info.version, "full", saved.size_bytes, saved.checksum, saved.file)
        if not await asyncio.to_thread(_is_linked, payload, self._node_id, path):
            descriptor = await asyncio.to_thread(os.open, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                await fetch_file(payload, [self._source_of(holder)], descriptor)
            finally:
                os.close(descriptor)
        if await asyncio.to_thread(_checksum_of, path) != saved.checksum:
            raise WeightsNotFetched("what was read from the replica has another checksum")


def _is_linked(payload: VersionPayload, node_id: str, path: Path) -> bool:
    """Makes `path` a hard link of the payload's file, if it is on a file system of this node."""
    if not is_readable_here(payload.file, payload.size_bytes, node_id):
        return False
    try:
        os.link(payload.file.path, path)
    except OSError:
        return False
    return True


def _checksum_of(path: Path) -> str | None:
    try:
        return file_checksum(path)
    except NotSafetensors:
        return None
