"""The versions that one node has, each as one file which all its replicas map.

    versions/7-5f3a….safetensors   version 7, whole
    versions/7-5f3a….fetching      version 7 as far as it has come
    versions/7-c2d8….safetensors   what changed from version 6 to 7, under the checksum of the changes
    versions/7-5f3a….lock          held by the process that fetches or removes version 7
    replicas/<pid>/                files of one replica alone

A file is fetched in ranges, several at a time, from the policy store. Guarantees: a node fetches a version once, while
its other replicas wait, and not at all if it can read the file of the policy store; of a version that comes as a delta
of weights which it has, it fetches the delta alone, and applies it once; a file has its final name only once its
checksum was found right; a version that is being fetched is not removed; memory holds at most `READS_IN_FLIGHT` ranges;
a fetch outlives a restart of the policy store. Pages that are mapped stay valid when their file is removed.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from filelock import AsyncFileLock, FileLock, Timeout

from deployments.failures import PolicyStoreLost, RolloutFailure
from deployments.policy.assembly import write_applied
from deployments.policy.commands import DeltaPayload, VersionPayload
from deployments.policy.failures import PolicyFailure
from deployments.storage.storage import attempts
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.safetensors_file import NotSafetensors

READ_BYTES = 8 * 2**20
"""Holds the event loops of both ends for some milliseconds while it is packed and unpacked."""
READS_IN_FLIGHT = 4
READ_TIMEOUT_S = 60.0
"""Who needs longer to give one range has failed."""
LOCK_POLL_S = 0.05
logger = logging.getLogger("rollout_service.policy")
ReadWeights = Callable[[int, str, int, int], Awaitable[bytes]]
"""`PolicyStore.read_weights`: bytes of a version's file by version, checksum, offset and count; fewer at its end."""
_ReadRange = Callable[[int, int], Awaitable[bytes]]
"""The same of one version, by offset and count."""


class WeightsNotFetched(Exception):
    """The policy store could not give the bytes, or they are not those of the version."""


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A safetensors file with the weights of one version, which this process can map."""

    path: Path
    fetched_bytes: int = 0
    """Bytes that this call fetched from other nodes."""
    read_bytes: int = 0
    """Size of the files that this call read for it: the delta, where it was applied here, or the weights. 0 if the node
    had the version, or another replica made it."""


class NodeWeights:
    """A replica's view of its node's weights.

    Args:
        folder: of this node, shared by all its replicas.
        node_id: of this node.
        read: fetches from the policy store.
    """

    def __init__(self, folder: Path, node_id: str, read: ReadWeights) -> None:
        self._versions = folder / "versions"
        self._replicas = folder / "replicas"
        self._membership = folder / "replicas.lock"
        self.node_id = node_id
        self._read = read

    @property
    def own_folder(self) -> Path:
        return self._replicas / str(os.getpid())

    def join(self) -> None:
        """Makes the replica's own folder, and removes those of processes that have ended."""
        self._versions.mkdir(parents=True, exist_ok=True)
        with FileLock(self._membership):
            self._remove_own_folders_of_the_dead()
            self.own_folder.mkdir(parents=True, exist_ok=True)

    def leave(self) -> None:
        """Removes the replica's own folder; the last replica of the node removes the versions too."""
        if not self._replicas.is_dir():
            return
        with FileLock(self._membership):
            shutil.rmtree(self.own_folder, ignore_errors=True)
            self._remove_own_folders_of_the_dead()
            if not any(self._replicas.iterdir()):
                shutil.rmtree(self._versions, ignore_errors=True)

    async def file_of(self, payload: VersionPayload) -> NodeFile:
        """The file of a version; fetches it if the node does not have it yet, or waits for a replica that does.

        Raises:
            WeightsNotFetched: the store could not give the bytes, or they are not those of the version.
            OSError: there is no room, or the folder cannot be written.
        """
        await asyncio.to_thread(self._remove_all_but, payload.keep)
        return await self._file_of(payload)

    async def _file_of(self, payload: VersionPayload) -> NodeFile:
        if payload.delta is None and _is_readable_here(payload, self.node_id):
            return NodeFile(Path(payload.file.path), read_bytes=payload.size_bytes)
        path = self._versions / f"{payload.version}-{payload.checksum}.safetensors"
        if path.exists():
            return NodeFile(path)
        async with AsyncFileLock(path.with_suffix(".lock"), poll_interval=LOCK_POLL_S):
            if path.exists():
                return NodeFile(path)
            if payload.delta is not None:
                return await self._apply(payload, payload.delta, path)
            await fetch_file(payload, self._reader(payload), path)
            return NodeFile(path, payload.size_bytes, payload.size_bytes)

    async def _apply(self, payload: VersionPayload, delta: DeltaPayload, path: Path) -> NodeFile:
        base, changes = await self._file_of(delta.base), await self._file_of(delta.changes)
        began, making, extra = time.perf_counter(), path.with_suffix(".fetching"), {"version": payload.version}
        try:
            if (made := await asyncio.to_thread(write_applied, base.path, changes.path, making)) != payload.checksum:
                message = f"the delta of version {delta.base.version} makes weights with the checksum {made}"
                raise WeightsNotFetched(f"Version {payload.version} has the checksum {payload.checksum}; {message}.")
            making.rename(path)
        except PolicyFailure as failure:
            raise WeightsNotFetched(f"The delta cannot be applied: {failure}") from failure
        finally:
            making.unlink(missing_ok=True)
        size_bytes, seconds = delta.changes.size_bytes, time.perf_counter() - began
        message = "Applied %d bytes of changes to version %d in %.3f s."
        logger.info(message, size_bytes, delta.base.version, seconds, extra=extra)
        return NodeFile(path, base.fetched_bytes + changes.fetched_bytes, base.fetched_bytes + size_bytes)

    @asynccontextmanager
    async def file_to_copy(self, payload: VersionPayload) -> AsyncIterator[NodeFile]:
        """A file for this replica alone, which makes a copy of it in the block; raises as `file_of` does.

        The node does not keep it: adapters of named policies, which are small.
        """
        if _is_readable_here(payload, self.node_id):
            yield NodeFile(Path(payload.file.path))
            return
        path = self._versions / f"{payload.checksum}-{os.getpid()}.safetensors"
        try:
            await fetch_file(payload, self._reader(payload), path)
            yield NodeFile(path, payload.size_bytes)
        finally:
            path.unlink(missing_ok=True)

    def _reader(self, payload: VersionPayload) -> _ReadRange:
        return partial(self._read, payload.version, payload.checksum)

    def _remove_all_but(self, versions: Collection[int]) -> None:
        for lock_path in self._versions.glob("*.lock"):
            if int(lock_path.name.partition("-")[0]) not in versions:
                _remove_version(lock_path)

    def _remove_own_folders_of_the_dead(self) -> None:
        for folder in self._replicas.iterdir() if self._replicas.is_dir() else ():
            if not psutil.pid_exists(int(folder.name)):
                shutil.rmtree(folder, ignore_errors=True)


async def fetch_file(payload: VersionPayload, read: _ReadRange, path: Path) -> None:
    """Writes the version's file to `path`.

    Raises:
        WeightsNotFetched: `read` could not give the bytes, or they are not those of the version.
        OSError: there is no room, or the folder cannot be written.
    """
    began = time.perf_counter()
    fetching = path.with_suffix(".fetching")
    try:
        await _fetch_ranges(payload, read, fetching)
        if await asyncio.to_thread(_checksum_if_readable, fetching) != payload.checksum:
            raise WeightsNotFetched(f"What was fetched as version {payload.version} has another checksum.")
        fetching.rename(path)
    finally:
        fetching.unlink(missing_ok=True)
    seconds = time.perf_counter() - began
    message = "Fetched %d bytes of version %d to this node in %.3f s."
    logger.info(message, payload.size_bytes, payload.version, seconds, extra={"version": payload.version})


async def _fetch_ranges(payload: VersionPayload, read: _ReadRange, path: Path) -> None:
    offsets = iter(range(0, payload.size_bytes, READ_BYTES))
    descriptor = await asyncio.to_thread(os.open, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    async def fetch() -> None:
        for offset in offsets:
            data = await _range(payload, read, offset)
            await asyncio.to_thread(os.pwrite, descriptor, data, offset)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(READS_IN_FLIGHT):
                tasks.create_task(fetch())
    except ExceptionGroup as failures:
        # `except*` would do, but Python 3.11.2 and older raise a group out of it.
        raise failures.exceptions[0] from None
    finally:
        os.close(descriptor)


async def _range(payload: VersionPayload, read: _ReadRange, offset: int) -> bytes:
    size = min(READ_BYTES, payload.size_bytes - offset)

    async def read_once() -> bytes:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await read(offset, size)

    try:
        data: bytes = await attempts(PolicyStoreLost)(read_once)
    except TimeoutError as failure:
        raise _not_fetched(payload, f"nothing came for {READ_TIMEOUT_S:g} s") from failure
    except (RolloutFailure, PolicyFailure, OSError) as failure:
        raise _not_fetched(payload, str(failure)) from failure
    if len(data) != size:
        raise _not_fetched(payload, f"{len(data)} bytes came in place of {size}")
    return data


def _not_fetched(payload: VersionPayload, reason: str) -> WeightsNotFetched:
    return WeightsNotFetched(f"The weights of version {payload.version} could not be fetched: {reason}")


def _checksum_if_readable(path: Path) -> str | None:
    with suppress(NotSafetensors):
        return file_checksum(path)
    return None


def _is_readable_here(payload: VersionPayload, node_id: str) -> bool:
    """Whether this node can read the very file of the policy store: it is the store's node, or shares its folder."""
    file = payload.file
    try:
        found = Path(file.path).stat()
    except OSError:
        return False
    is_the_file = (found.st_size, found.st_ino, found.st_mtime_ns) == (payload.size_bytes, file.inode, file.modified_ns)
    return file.node_id == node_id or (is_the_file and not file.is_copied)


def _remove_version(lock_path: Path) -> None:
    """Removes the files of the version with this lock, unless a process holds it."""
    with suppress(Timeout), FileLock(lock_path, timeout=0):
        for suffix in (".safetensors", ".fetching", ".lock"):
            lock_path.with_suffix(suffix).unlink(missing_ok=True)
