"""Uploads over HTTP in chunks: what has arrived of versions that are not complete yet, and who may write it.

    uploads/8.part    the bytes of version 8 that have arrived
    uploads/8.json    how many there will be, who began, and why they were refused

Guarantees: bytes lie without holes from the first one on, and the store that starts in place of one that died has them.
A crash of the machine may lose the last of them, and the digest of the whole reveals other damage. Of several senders
of one version only the one that began the last chunk may write, so the bytes of two senders never mix; nothing is
written once all has arrived and the version is being validated; an upload never grows beyond what weights of the model
can have, and all together not beyond their quota; a complete upload that was refused stays for another try, until it
expires or another upload needs its room; there is at most one push of a version at a time, and the same push sent again
gets the result of the first.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, Field

from deployments.policy.durable_files import make_folder_durably, write_durably
from deployments.policy.failures import ChunkMisplaced, UploadsFull, VersionRefused, VersionUnknown
from deployments.policy.versions import Versions
from deployments.policy.weight_checks import largest_upload_bytes, too_large
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.policy import PolicyUpdate, UploadState


def utc_now() -> datetime:
    return datetime.now(UTC)


def nothing_arrived(version: int) -> VersionUnknown:
    return VersionUnknown.of("version", "nothing of it has arrived; begin at its first byte", version)


class _UploadNote(BaseModel):
    """The content of `uploads/8.json`."""

    total_bytes: int | None = None
    owner: str | None = None
    changed_at: datetime = Field(default_factory=utc_now)
    """When a chunk was begun or ended last, or the upload was refused."""
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class _ActivePush:
    content: str | None
    """Identifies the same push: the `weights_digest` that its sender says, or the checkpoint's location."""
    task: asyncio.Task[PolicyUpdate]


class ActivePushes(dict[int, _ActivePush]):
    """The pushes of one policy that are under way, by version."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        super().__init__()
        self._tasks = tasks

    async def run(self, version: int, content: str | None, work: Coroutine[Any, Any, PolicyUpdate]) -> PolicyUpdate:
        """Runs `work` to its end, even if the caller is cancelled; returns or raises what it does."""
        task = self._tasks.start(work)
        self[version] = _ActivePush(content, task)
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
        versions: in whose folder the uploads are, so that a complete one can be linked into it.
        active_pushes: pushes whose uploads stay as they are.
        quota_bytes: of all unfinished uploads, those of other policies included; `None` for
            `LARGEST_UPLOADS_IN_QUOTA` of the largest ones.
        expiry_s: an upload expires so many seconds after it changed last.
    """

    def __init__(
        self, versions: Versions, active_pushes: ActivePushes, quota_bytes: int | None, expiry_s: float
    ) -> None:
        self._folder = versions.folder / "uploads"
        self._versions = versions
        self._active_pushes = active_pushes
        self._quota_bytes = quota_bytes
        self._expiry = timedelta(seconds=expiry_s)
        self._senders: dict[int, str] = {}
        """By version, who began the last chunk."""
        self._writing = asyncio.Lock()
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Removes what an earlier store left when it died, except uploads of later versions that can be continued."""
        self.drop_up_to(self._versions.current)
        for path in self._folder.glob("*"):
            if path.suffix not in (".part", ".json") or self._note(int(path.stem)) is None:
                self._versions.trash.discard(path)

    @property
    def are_being_written(self) -> bool:
        return self._writing.locked()

    def state(self, version: int) -> UploadState:
        """Raises `VersionUnknown` if nothing of it has arrived."""
        note = self._note(version)
        if note is None:
            raise nothing_arrived(version)
        return self._state_of(version, note)

    def states(self) -> list[UploadState]:
        """The states of all versions of which something has arrived, in order."""
        return [self._state_of(version, note) for version, note in self._notes().items()]

    def _state_of(self, version: int, note: _UploadNote) -> UploadState:
        noted = note.model_dump(exclude={"changed_at"})
        expires_at = note.changed_at + self._expiry
        return UploadState(version=version, received_bytes=self._size(version), **noted, expires_at=expires_at)

    def path(self, version: int) -> Path:
        return self._folder / f"{version}.part"

    async def begin_chunk(self, version: int, first_byte: int, owner: str | None = None) -> str:
        """Returns the id of the sender, who alone may write until another chunk of the version is begun.

        What had arrived from `first_byte` on is discarded.

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
            await asyncio.to_thread(self._begin, version, first_byte, owner)
            return sender

    def _begin(self, version: int, first_byte: int, owner: str | None) -> None:
        note, path = self._note(version), self.path(version)
        if first_byte > (0 if note is None else self._size(version)):
            raise self._misplaced(version, first_byte)
        make_folder_durably(path.parent)
        if first_byte == 0:
            self._versions.trash.discard(path)
        with path.open("ab") as file:
            file.truncate(first_byte)
        self._write_note(version, _UploadNote(owner=note.owner if note is not None and first_byte else owner))

    async def write_chunk(self, version: int, sender: str, offset: int, data: bytes) -> None:
        """Writes bytes, which begin where those before them ended, or earlier if they are written again.

        Raises:
            ChunkMisplaced: another sender has begun a chunk since, or the upload was dropped.
            WeightsRefused: the upload exceeds what weights of the model can have; it is dropped.
            UploadsFull: the quota is used up by other uploads that were not refused.
        """
        most_bytes = largest_upload_bytes(await self._versions.initial.layout())
        async with self._writing:
            self.refuse_overtaken(version, sender)
            if offset + len(data) > most_bytes:
                self.drop(version)
                raise too_large(most_bytes)
            self._make_room(version, offset + len(data), self._quota_bytes or LARGEST_UPLOADS_IN_QUOTA * most_bytes)
            await asyncio.to_thread(self._write, version, offset, data)

    def _write(self, version: int, offset: int, data: bytes) -> None:
        self._refuse_hole(version, offset)
        with self.path(version).open("r+b") as file:
            file.seek(offset)
            file.write(data)
            file.truncate()

    def _make_room(self, version: int, size_bytes: int, quota_bytes: int) -> None:
        """Drops refused uploads, the oldest first, as far as one that grows to `size_bytes` needs their room."""
        kept = {version, *self._active_pushes}
        while (used := self._bytes_of_others(version) + size_bytes) > quota_bytes:
            notes = self._notes().items()
            refused = {each: note for each, note in notes if note.refused is not None and each not in kept}
            if not refused:
                message = (
                    f"with these bytes all unfinished uploads would have {used}, and may have {quota_bytes}; finish "
                    "the others, wait until they expire (GET /policy lists them), or raise policy.upload_quota_bytes"
                )
                raise UploadsFull.of("version", message, version)
            self.drop(min(refused, key=lambda each: refused[each].changed_at))

    def _bytes_of_others(self, version: int) -> int:
        """Size of all other uploads in the store's folder, of whatever policy, whether their bytes count yet or not."""
        root, own = self._versions.trash.folder, self.path(version)
        uploads = (*root.glob("uploads/*.part"), *root.glob("names/*/uploads/*.part"))
        return sum(path.stat().st_size for path in uploads if path != own)

    async def end_chunk(self, version: int, sender: str, total_bytes: int | None) -> UploadState:
        """Records how many bytes there will be. Raises `ChunkMisplaced` as `write_chunk` does."""
        async with self._writing:
            self.refuse_overtaken(version, sender)
            return await asyncio.to_thread(self._end, version, total_bytes)

    def _end(self, version: int, total_bytes: int | None) -> UploadState:
        self._refuse_hole(version, 0)
        self._change_note(version, total_bytes=total_bytes, refused=None)
        return self.state(version)

    def refuse_overtaken(self, version: int, sender: str) -> None:
        """Raises `ChunkMisplaced` unless `sender` began the last chunk and the version is not being validated."""
        if self._senders.get(version) != sender or version in self._active_pushes:
            raise ChunkMisplaced.of("content-range", OVERTAKEN)

    def keep_refused(self, version: int, reason: str) -> None:
        """Keeps a complete upload for another try, unless its version can no longer become current."""
        if version <= self._versions.newest:
            self.drop(version)
        elif self._note(version) is not None:
            self._change_note(version, refused=reason)

    def drop(self, version: int) -> None:
        """The upload is unknown at once; its bytes are deleted by `Trash.empty`."""
        self._note_path(version).unlink(missing_ok=True)
        self._versions.trash.discard(self.path(version))

    def drop_expired(self) -> None:
        """Drops the uploads that have expired, except those of pushes under way."""
        for version, note in self._notes().items():
            if version not in self._active_pushes and note.changed_at + self._expiry <= utc_now():
                self.drop(version)

    def drop_up_to(self, version: int) -> None:
        """Drops what has arrived of versions that can no longer become current, except of pushes under way."""
        for path in self._folder.glob("*.json"):
            if int(path.stem) <= version and int(path.stem) not in self._active_pushes:
                self.drop(int(path.stem))
        self._senders = {uploaded: sender for uploaded, sender in self._senders.items() if uploaded > version}

    def _notes(self) -> dict[int, _UploadNote]:
        noted = sorted(int(path.stem) for path in self._folder.glob("*.json"))
        return {version: note for version in noted if (note := self._note(version)) is not None}

    def _note(self, version: int) -> _UploadNote | None:
        """`None` also if there are no bytes beside it: the machine crashed, or the upload was moved away."""
        try:
            note = _UploadNote.model_validate_json(self._note_path(version).read_text())
        except FileNotFoundError:
            return None
        return note if self._size(version) >= 0 else None

    def _size(self, version: int) -> int:
        """-1 if the file is not there."""
        try:
            return self.path(version).stat().st_size
        except FileNotFoundError:
            return -1

    def _refuse_hole(self, version: int, offset: int) -> None:
        if self._size(version) < offset:
            raise self._misplaced(version, offset)

    def _misplaced(self, version: int, first_byte: int) -> ChunkMisplaced:
        received_bytes = 0 if self._note(version) is None else self._size(version)
        message = f"{received_bytes} bytes have arrived; go on from there"
        return ChunkMisplaced.of("content-range", message, first_byte)

    def _change_note(self, version: int, **changes: Any) -> None:
        note = self._note(version) or _UploadNote()
        self._write_note(version, note.model_copy(update={**changes, "changed_at": utc_now()}))

    def _write_note(self, version: int, note: _UploadNote) -> None:
        write_durably(self._note_path(version), note.model_dump_json())

    def _note_path(self, version: int) -> Path:
        return self._folder / f"{version}.json"
