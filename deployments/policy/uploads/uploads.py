"""What arrives of a version over HTTP, in chunks, and who may write it.

Guarantees: of several senders of one version only the one that began the last chunk may write, so the bytes of two
senders never mix; nothing is written once all has arrived and the version is being validated; an upload never grows
beyond what weights of the model can have.
"""

import asyncio
from pathlib import Path
from uuid import uuid4

from deployments.policy.background_tasks import BackgroundTasks
from deployments.policy.failures import ChunkMisplaced
from deployments.policy.uploads.active_pushes import ActivePushes
from deployments.policy.uploads.upload_store import UploadStore
from deployments.policy.validation.weight_checks import largest_upload_bytes, too_large
from deployments.policy.versions.initial_version import InitialVersion
from deployments.policy.versions.version_history import PolicyVersions
from rollout_client.policy_contract import UploadState
from rollout_client.problem_contract import FieldProblem

OVERTAKEN = "another sender has begun a chunk of the same version since, or all of it has arrived"


class Uploads:
    def __init__(
        self,
        store: UploadStore,
        versions: PolicyVersions,
        initial: InitialVersion,
        active_pushes: ActivePushes,
        tasks: BackgroundTasks,
    ) -> None:
        self._store = store
        self._versions = versions
        self._initial = initial
        self._active_pushes = active_pushes
        self._tasks = tasks
        self._senders: dict[int, str] = {}
        """By version, who began the last chunk."""
        self._writing = asyncio.Lock()

    def state(self, version: int) -> UploadState:
        """Raises `VersionUnknown` if nothing of it has arrived."""
        return self._store.state(version)

    async def begin_chunk(self, version: int, first_byte: int) -> str:
        """Returns the id of the sender, who alone may write until another chunk of the version is begun.

        Raises:
            VersionRefused: the number is taken, or a push of the version is under way.
            ChunkMisplaced: the chunk begins beyond what has arrived.
        """
        async with self._writing:
            self._versions.refuse_taken(version)
            self._active_pushes.refuse_active(version)
            self._store.begin_chunk(version, first_byte)
            sender = self._senders[version] = uuid4().hex
            return sender

    async def write_chunk(self, version: int, sender: str, offset: int, data: bytes) -> None:
        """Writes bytes, which count once the chunk has ended; the write ends even if the caller goes away.

        Raises:
            ChunkMisplaced: another sender has begun a chunk since, or the upload was dropped.
            WeightsRefused: the upload exceeds what weights of the model can have; it is dropped.
        """
        await self._tasks.finish(self._write_chunk(version, sender, offset, data))

    async def _write_chunk(self, version: int, sender: str, offset: int, data: bytes) -> None:
        most_bytes = largest_upload_bytes(await self._initial.layout())
        async with self._writing:
            self.refuse_overtaken(version, sender)
            if offset + len(data) > most_bytes:
                self._store.drop(version)
                raise too_large(most_bytes)
            await asyncio.to_thread(self._store.write_chunk, version, offset, data)

    async def end_chunk(self, version: int, sender: str, end: int, total_bytes: int | None) -> UploadState:
        """Counts the bytes before `end`. Raises `ChunkMisplaced` as `write_chunk` does."""
        async with self._writing:
            self.refuse_overtaken(version, sender)
            return self._store.end_chunk(version, end, total_bytes)

    def refuse_overtaken(self, version: int, sender: str) -> None:
        """Raises `ChunkMisplaced` unless `sender` began the last chunk and the version is not being validated."""
        if self._senders.get(version) != sender or version in self._active_pushes:
            raise ChunkMisplaced(FieldProblem(field="content-range", message=OVERTAKEN))

    def path(self, version: int) -> Path:
        return self._store.path(version)

    def drop(self, version: int) -> None:
        self._store.drop(version)

    def drop_up_to(self, version: int) -> None:
        """Drops what has arrived of versions that can no longer become current."""
        self._store.drop_up_to(version, but=self._active_pushes)
        self._senders = {uploaded: sender for uploaded, sender in self._senders.items() if uploaded > version}
