"""Uploads over HTTP in chunks: who may write them, their quota, and which complete versions are being pushed.

Guarantees: of several senders of one version only the one that began the last chunk may write, so the bytes of two
senders never mix; nothing is written once all has arrived and the version is being validated; an upload never grows
beyond what weights of the model can have, and all together not beyond their quota; a complete upload that was refused
stays for another try, until it expires or another upload needs its room; there is at most one push of a version at a
time, and the same push sent again gets the result of the first.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from deployments.policy.failures import ChunkMisplaced, UploadsFull, VersionRefused
from deployments.policy.uploads.upload_store import UploadStore
from deployments.policy.versions.full_weights import InitialVersion
from deployments.policy.versions.housekeeping import Housekeeping
from deployments.policy.versions.version_history import VersionHistory
from deployments.policy.versions.weight_checks import largest_upload_bytes, too_large
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.policy import PolicyUpdate, UploadState


@dataclass(frozen=True, slots=True)
class ActivePush:
    content: str | None
    """Identifies the same push: the `weights_digest` that its sender says, or the checkpoint's location."""
    task: asyncio.Task[PolicyUpdate]


class ActivePushes(dict[int, ActivePush]):
    """The pushes of one policy that are under way, by version."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        super().__init__()
        self._tasks = tasks

    async def run(self, version: int, content: str | None, work: Coroutine[Any, Any, PolicyUpdate]) -> PolicyUpdate:
        """Runs `work` to its end, even if the caller is cancelled; returns or raises what it does."""
        task = self._tasks.start(work)
        self[version] = ActivePush(content, task)
        task.add_done_callback(lambda _: self.pop(version))
        return await asyncio.shield(task)

    @property
    def are_running(self) -> bool:
        """Whether one of them has not ended: those that have are in the set for another turn of the event loop."""
        return any(not push.task.done() for push in self.values())

    async def result_of_same(self, version: int, content: str) -> PolicyUpdate | None:
        """Waits for the push of the same version and content; `None` if there is none. Raises what the push does."""
        push = self.get(version)
        if push is None or push.content != content:
            return None
        return await asyncio.shield(push.task)

    def refuse_active(self, version: int) -> None:
        """Raises `VersionRefused` if a push of the version is under way."""
        if version in self:
            message = "all of it has arrived, and it is being validated and loaded by the replicas"
            raise VersionRefused.of("version", message, version)


OVERTAKEN = "another sender has begun a chunk of the same version since, or all of it has arrived"
LARGEST_UPLOADS_IN_QUOTA = 4


class Uploads:
    """The uploads of one policy. Calls that write have to be finished even if their caller goes away.

    Args:
        quota_bytes: of all unfinished uploads, those of other policies included; `None` for
            `LARGEST_UPLOADS_IN_QUOTA` of the largest ones.
    """

    def __init__(
        self,
        store: UploadStore,
        versions: VersionHistory,
        initial: InitialVersion,
        active_pushes: ActivePushes,
        housekeeping: Housekeeping,
        quota_bytes: int | None,
    ) -> None:
        self._store = store
        self._versions = versions
        self._initial = initial
        self._active_pushes = active_pushes
        self._housekeeping = housekeeping
        self._quota_bytes = quota_bytes
        self._senders: dict[int, str] = {}
        """By version, who began the last chunk."""
        self._writing = asyncio.Lock()

    async def begin_chunk(self, version: int, first_byte: int, owner: str | None = None) -> str:
        """Returns the id of the sender, who alone may write until another chunk of the version is begun.

        Args:
            owner: what the state of the upload says of whoever sends its first byte.

        Raises:
            VersionRefused: the number is taken or too far ahead, or a push of the version is under way.
            ChunkMisplaced: the chunk begins beyond what has arrived.
        """
        async with self._writing:
            self._versions.refuse_taken(version)
            self._active_pushes.refuse_active(version)
            sender = self._senders[version] = uuid4().hex
            await asyncio.to_thread(self._store.begin_chunk, version, first_byte, owner)
            self._housekeeping.wake()
            return sender

    async def write_chunk(self, version: int, sender: str, offset: int, data: bytes) -> None:
        """Writes bytes, which count once the chunk has ended.

        Raises:
            ChunkMisplaced: another sender has begun a chunk since, or the upload was dropped.
            WeightsRefused: the upload exceeds what weights of the model can have; it is dropped.
            UploadsFull: the quota is used up by other uploads that were not refused.
        """
        most_bytes = largest_upload_bytes(await self._initial.layout())
        async with self._writing:
            self.refuse_overtaken(version, sender)
            if offset + len(data) > most_bytes:
                self._store.drop(version)
                raise too_large(most_bytes)
            self._make_room(version, offset + len(data), self._quota_bytes or LARGEST_UPLOADS_IN_QUOTA * most_bytes)
            await asyncio.to_thread(self._store.write_chunk, version, offset, data)

    def _make_room(self, version: int, size_bytes: int, quota_bytes: int) -> None:
        """Drops refused uploads, the oldest first, as far as one that grows to `size_bytes` needs their room."""
        while (used := self._store.bytes_of_others(version) + size_bytes) > quota_bytes:
            refused = self._store.oldest_refused(but={version, *self._active_pushes})
            if refused is None:
                message = (
                    f"with these bytes all unfinished uploads would have {used}, and may have {quota_bytes}; finish "
                    "the others, wait until they expire (GET /policy lists them), or raise policy.upload_quota_bytes"
                )
                raise UploadsFull.of("version", message, version)
            self._store.drop(refused)

    async def end_chunk(self, version: int, sender: str, end: int, total_bytes: int | None) -> UploadState:
        """Counts the bytes before `end`. Raises `ChunkMisplaced` as `write_chunk` does."""
        async with self._writing:
            self.refuse_overtaken(version, sender)
            return await asyncio.to_thread(self._store.end_chunk, version, end, total_bytes)

    def refuse_overtaken(self, version: int, sender: str) -> None:
        """Raises `ChunkMisplaced` unless `sender` began the last chunk and the version is not being validated."""
        if self._senders.get(version) != sender or version in self._active_pushes:
            raise ChunkMisplaced.of("content-range", OVERTAKEN)

    def keep_refused(self, version: int, reason: str) -> None:
        """Keeps a complete upload for another try, unless its version can no longer become current."""
        if self._versions.is_taken(version):
            self._store.drop(version)
        else:
            self._store.refuse(version, reason)

    def drop_expired(self) -> None:
        """Drops the uploads that have expired, except those of pushes under way."""
        for state in self._expiring():
            if self._store.seconds_left(state) <= 0:
                self._store.drop(state.version)

    def next_expiry_s(self) -> float | None:
        return min((max(self._store.seconds_left(state), 0.0) for state in self._expiring()), default=None)

    def _expiring(self) -> list[UploadState]:
        return [state for state in self._store.states() if state.version not in self._active_pushes]

    def drop_up_to(self, version: int) -> None:
        """Drops what has arrived of versions that can no longer become current."""
        self._store.drop_up_to(version, but=self._active_pushes)
        self._senders = {uploaded: sender for uploaded, sender in self._senders.items() if uploaded > version}
