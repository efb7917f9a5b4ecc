"""Uploads over HTTP in chunks: what has arrived of versions that are not complete yet, and who may write it.

    uploads/8.part    the bytes of version 8 that have arrived

Guarantees: bytes lie without holes from the first one on, and the store that starts in place of one that died has them.
A crash of the machine may lose the last of them, and the digest of the whole reveals other damage. Of several senders
of one version only the one that began the last chunk may write, so the bytes of two senders never mix; nothing is
written once all has arrived and the version is being validated; an upload never grows beyond what weights of the model
can have, and is removed `EXPIRY_S` seconds after something of it arrived last.
"""

import asyncio
from collections.abc import Container
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

from deployments.policy.durable_files import make_folder_durably
from deployments.policy.failures import ChunkMisplaced, VersionRefused
from deployments.policy.versions import Versions
from deployments.policy.weight_checks import largest_upload_bytes, too_large
from rollout_client.contract.policy import UploadState

EXPIRY_S = 86_400.0
OVERTAKEN = "another sender has begun a chunk of the same version since, or all of it has arrived"


class Uploads:
    """The uploads of one policy. Calls that write have to be finished even if their caller goes away.

    Args:
        versions: in whose folder the uploads are, so that a complete one can be linked into it.
        active: the versions of pushes under way, whose uploads stay as they are.
    """

    def __init__(self, versions: Versions, active: Container[int]) -> None:
        self._folder = versions.folder / "uploads"
        self._versions = versions
        self._active = active
        self._senders: dict[int, str] = {}
        """By version, who began the last chunk."""
        self._writing = asyncio.Lock()
        self.drop_up_to(versions.current)

    def find(self, version: int) -> UploadState | None:
        """The state of the upload; `None` if nothing of it has arrived."""
        try:
            found = self.path(version).stat()
        except FileNotFoundError:
            return None
        expires_at = datetime.fromtimestamp(found.st_mtime, UTC) + timedelta(seconds=EXPIRY_S)
        return UploadState(version=version, received_bytes=found.st_size, expires_at=expires_at)

    def states(self) -> list[UploadState]:
        """The states of all versions of which something has arrived, in order."""
        return [state for version in self._versions_begun() if (state := self.find(version)) is not None]

    def path(self, version: int) -> Path:
        return self._folder / f"{version}.part"

    async def write(self, version: int, sender: str | None, offset: int, data: bytes) -> str:
        """Writes bytes, and discards what had arrived from their place on. Returns the id of their sender.

        Args:
            sender: `None` begins a chunk. Its sender alone may write until another chunk of the version is begun.
            offset: where the bytes before them ended, or earlier if they are written again.

        Raises:
            VersionRefused: the number is taken, or a push of the version is under way.
            ChunkMisplaced: the bytes lie beyond what has arrived, another sender has begun a chunk since, or the upload
                was dropped.
            WeightsRefused: the upload exceeds what weights of the model can have; it is dropped.
        """
        async with self._writing:
            if sender is None:
                self._versions.refuse_taken(version)
                self.refuse_active(version)
                sender = self._senders[version] = uuid4().hex
            self.refuse_overtaken(version, sender)
            await asyncio.to_thread(self._write, version, offset, data)
            return sender

    def _write(self, version: int, offset: int, data: bytes) -> None:
        most_bytes = largest_upload_bytes(self._versions.initial.layout)
        if offset + len(data) > most_bytes:
            self.drop(version)
            raise too_large(most_bytes)
        path, state = self.path(version), self.find(version)
        received_bytes = 0 if state is None else state.received_bytes
        if offset > received_bytes:
            raise ChunkMisplaced.of("content-range", f"{received_bytes} bytes have arrived; go on from there", offset)
        make_folder_durably(path.parent)
        if offset == 0:
            self._versions.trash.discard(path)
        with path.open("ab") as file:
            file.truncate(offset)
            file.write(data)

    def refuse_active(self, version: int) -> None:
        """Raises `VersionRefused` if a push of the version is under way."""
        if version in self._active:
            message = "all of it has arrived, and it is being validated and loaded by the replicas"
            raise VersionRefused.of("version", message, version)

    def refuse_overtaken(self, version: int, sender: str) -> None:
        """Raises `ChunkMisplaced` unless `sender` began the last chunk and the version is not being validated."""
        if self._senders.get(version) != sender or version in self._active:
            raise ChunkMisplaced.of("content-range", OVERTAKEN)

    def drop(self, version: int) -> None:
        """The upload is unknown at once; its bytes are deleted by `Trash.empty`."""
        self._senders.pop(version, None)
        self._versions.trash.discard(self.path(version))

    def drop_expired(self) -> None:
        """Drops the uploads that have expired, except those of pushes under way."""
        for state in self.states():
            expired = state.expires_at is not None and state.expires_at <= datetime.now(UTC)
            if expired and state.version not in self._active:
                self.drop(state.version)

    def drop_up_to(self, version: int) -> None:
        """Drops what has arrived of versions that can no longer become current, except of pushes under way."""
        for begun in self._versions_begun():
            if begun <= version and begun not in self._active:
                self.drop(begun)

    def _versions_begun(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*.part"))
