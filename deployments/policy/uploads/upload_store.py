"""Uploads on disk: the chunks that have arrived of versions that are not complete yet.

    uploads/8.part    the bytes of version 8, perhaps with an unfinished chunk at the end
    uploads/8.json    how many of them count, how many there will be, who began, and why they were refused

Guarantees: bytes count once their chunk has ended, and they lie without holes from the first byte on; what counted is
known to the store that starts in place of one that died. A crash of the machine may lose bytes that counted: an upload
that is shorter than it should be is unknown, and the digest of the whole reveals other damage.
"""

import math
import os
from collections.abc import Collection, Container
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from deployments.policy.failures import ChunkMisplaced, VersionUnknown
from deployments.policy.versions.housekeeping import Trash
from deployments.policy.versions.version_store import make_folder_durably, write_durably
from rollout_client.contract.policy import UploadState


def utc_now() -> datetime:
    return datetime.now(UTC)


class UploadNote(BaseModel):
    """The content of `uploads/8.json`."""

    received_bytes: int = 0
    total_bytes: int | None = None
    owner: str | None = None
    changed_at: datetime = Field(default_factory=utc_now)
    """When a chunk was begun or ended last, or the upload was refused."""
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class UploadStore:
    """All paths are under `folder`, that of the version store, so that a complete upload can be linked into it.

    Args:
        expiry_s: an upload expires so many seconds after it changed last; never if `None`.
        trash_folder: of the version store whose trash takes what is discarded here; by default this one.
    """

    folder: Path
    expiry_s: float | None = None
    trash_folder: Path | None = None

    def state(self, version: int) -> UploadState:
        """Raises `VersionUnknown` if nothing of it has arrived."""
        note = self._note(version)
        if note is None:
            message = "nothing of it has arrived; begin at its first byte"
            raise VersionUnknown.of("version", message, version)
        return self._state_of(version, note)

    def states(self) -> list[UploadState]:
        """The states of all versions of which something has arrived, in order."""
        return [self._state_of(version, note) for version, note in self._notes().items()]

    def _state_of(self, version: int, note: UploadNote) -> UploadState:
        return UploadState(
            version=version,
            received_bytes=note.received_bytes,
            total_bytes=note.total_bytes,
            owner=note.owner,
            refused=note.refused,
            expires_at=None if self.expiry_s is None else note.changed_at + timedelta(seconds=self.expiry_s),
        )

    def bytes_of_others(self, version: int) -> int:
        """Size of all other uploads in the store's folder, of whatever policy, whether their bytes count yet or not."""
        root, own = self.trash_folder or self.folder, self.path(version)
        uploads = (*root.glob("uploads/*.part"), *root.glob("names/*/uploads/*.part"))
        return sum(path.stat().st_size for path in uploads if path != own)

    def begin_chunk(self, version: int, first_byte: int, owner: str | None = None) -> None:
        """Discards what had arrived from `first_byte` on; at 0 the upload begins again, and is that of `owner`.

        Raises:
            ChunkMisplaced: the chunk begins beyond what has arrived.
        """
        received = self._received_bytes(version)
        if first_byte > received:
            raise self._misplaced(version, first_byte)
        path = self.path(version)
        make_folder_durably(path.parent)
        if first_byte == 0:
            self._write_note(version, UploadNote(owner=owner, changed_at=utc_now()))
            self._discard(path)
        elif first_byte < received:
            self._change_note(version, received_bytes=first_byte, total_bytes=None, refused=None)
        with path.open("ab") as file:
            file.truncate(first_byte)

    def write_chunk(self, version: int, offset: int, data: bytes) -> None:
        """Writes bytes of a chunk, which count once `end_chunk` was called.

        Raises:
            ChunkMisplaced: another sender has begun the upload again, or it was dropped.
        """
        self._refuse_hole(version, offset)
        with self.path(version).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def end_chunk(self, version: int, end: int, total_bytes: int | None) -> UploadState:
        """Counts the bytes before `end`; raises what `write_chunk` raises."""
        self._refuse_hole(version, end)
        os.truncate(self.path(version), end)
        self._change_note(version, received_bytes=end, total_bytes=total_bytes, refused=None)
        return self.state(version)

    def refuse(self, version: int, reason: str) -> None:
        """Notes why the complete upload was refused; it stays for another try. Unknown versions are ignored."""
        if self._note(version) is not None:
            self._change_note(version, refused=reason)

    def path(self, version: int) -> Path:
        return self.folder / "uploads" / f"{version}.part"

    def drop(self, version: int) -> None:
        """The upload is unknown at once; its bytes are deleted by `Trash.empty`."""
        self._note_path(version).unlink(missing_ok=True)
        self._discard(self.path(version))

    def seconds_left(self, upload: UploadState) -> float:
        """Until the upload expires; negative afterwards, infinite if it does not expire."""
        return math.inf if upload.expires_at is None else (upload.expires_at - utc_now()).total_seconds()

    def oldest_refused(self, but: Collection[int] = ()) -> int | None:
        """The refused upload that changed first, except those in `but`."""
        refused = {
            version: note.changed_at
            for version, note in self._notes().items()
            if version not in but and note.refused is not None
        }
        return min(refused, key=refused.__getitem__, default=None)

    def drop_up_to(self, version: int, but: Container[int] = ()) -> None:
        """Drops the uploads of versions up to `version`, except those in `but`."""
        for path in self.folder.glob("uploads/*.json"):
            uploaded = int(path.stem)
            if uploaded <= version and uploaded not in but:
                self.drop(uploaded)

    def remove_unfinished(self, current: int) -> None:
        """Removes what an earlier store left when it died, except uploads of later versions that can be continued."""
        self.drop_up_to(current)
        for path in self.folder.glob("uploads/*"):
            if path.suffix not in (".part", ".json") or self._note(int(path.stem)) is None:
                self._discard(path)

    def _notes(self) -> dict[int, UploadNote]:
        noted = sorted(int(path.stem) for path in self.folder.glob("uploads/*.json"))
        return {version: note for version in noted if (note := self._note(version)) is not None}

    def _note(self, version: int) -> UploadNote | None:
        """`None` also if bytes that counted are missing: the machine crashed, or the upload was moved away."""
        note = self._read_note(version)
        return note if note is not None and self._size(version) >= note.received_bytes else None

    def _read_note(self, version: int) -> UploadNote | None:
        try:
            return UploadNote.model_validate_json(self._note_path(version).read_text())
        except FileNotFoundError:
            return None

    def _size(self, version: int) -> int:
        """-1 if the file is not there."""
        try:
            return self.path(version).stat().st_size
        except FileNotFoundError:
            return -1

    def _received_bytes(self, version: int) -> int:
        note = self._note(version)
        return 0 if note is None else note.received_bytes

    def _refuse_hole(self, version: int, offset: int) -> None:
        if self._size(version) < offset:
            raise self._misplaced(version, offset)

    def _misplaced(self, version: int, first_byte: int) -> ChunkMisplaced:
        message = f"{self._received_bytes(version)} bytes have arrived; go on from there"
        return ChunkMisplaced.of("content-range", message, first_byte)

    def _change_note(self, version: int, **changes: Any) -> None:
        note = self._read_note(version) or UploadNote()
        self._write_note(version, note.model_copy(update={**changes, "changed_at": utc_now()}))

    def _write_note(self, version: int, note: UploadNote) -> None:
        write_durably(self._note_path(version), note.model_dump_json())

    def _discard(self, path: Path) -> None:
        if path.exists():
            Trash(self.trash_folder or self.folder).discard(path)

    def _note_path(self, version: int) -> Path:
        return self.folder / "uploads" / f"{version}.json"
