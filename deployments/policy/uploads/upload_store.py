"""Uploads on disk: the chunks that have arrived of versions that are not complete yet.

    uploads/8.part    the bytes of version 8, perhaps with an unfinished chunk at the end
    uploads/8.json    how many of them count, and how many there will be

Guarantees: bytes count once their chunk has ended, and they lie without holes from the first byte on; what counted is
known to the store that starts in place of one that died. A crash of the machine may lose bytes that counted: an upload
that is shorter than it should be is unknown, and the digest of the whole reveals other damage.
"""

import os
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from deployments.policy.failures import ChunkMisplaced, VersionUnknown
from deployments.policy.versions.durable_files import make_folder_durably, write_durably
from rollout_client.policy_contract import UploadState
from rollout_client.problem_contract import FieldProblem


class UploadNote(BaseModel):
    """The content of `uploads/8.json`."""

    received_bytes: int = 0
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class UploadStore:
    """All paths are under `folder`, that of the version store, so that a complete upload can be moved into it."""

    folder: Path

    def state(self, version: int) -> UploadState:
        """Raises `VersionUnknown` if nothing of it has arrived."""
        note = self._note(version)
        if note is None:
            message = "nothing of it has arrived; begin at its first byte"
            raise VersionUnknown(FieldProblem(field="version", message=message, value=version))
        return UploadState(version=version, received_bytes=note.received_bytes, total_bytes=note.total_bytes)

    def begin_chunk(self, version: int, first_byte: int) -> None:
        """Discards what had arrived from `first_byte` on; at 0 the upload begins anew.

        Raises:
            ChunkMisplaced: the chunk begins beyond what has arrived.
        """
        received = self._received_bytes(version)
        if first_byte > received:
            raise self._misplaced(version, first_byte)
        path = self.path(version)
        make_folder_durably(path.parent)
        if first_byte < received or first_byte == 0:
            self._write_note(version, UploadNote(received_bytes=first_byte))
        with path.open("ab") as file:
            file.truncate(first_byte)

    def write_chunk(self, version: int, offset: int, data: bytes) -> None:
        """Writes bytes of a chunk, which count once `end_chunk` was called.

        Raises:
            ChunkMisplaced: another sender has begun the upload anew, or it was dropped.
        """
        self._refuse_hole(version, offset)
        with self.path(version).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def end_chunk(self, version: int, end: int, total_bytes: int | None) -> UploadState:
        """Counts the bytes before `end`; raises what `write_chunk` raises."""
        self._refuse_hole(version, end)
        os.truncate(self.path(version), end)
        self._write_note(version, UploadNote(received_bytes=end, total_bytes=total_bytes))
        return self.state(version)

    def path(self, version: int) -> Path:
        return self.folder / "uploads" / f"{version}.part"

    def drop(self, version: int) -> None:
        self.path(version).unlink(missing_ok=True)
        self._note_path(version).unlink(missing_ok=True)

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
                path.unlink()

    def _note(self, version: int) -> UploadNote | None:
        """`None` also if bytes that counted are missing: the machine crashed, or the upload was moved away."""
        note_path, path = self._note_path(version), self.path(version)
        if not note_path.exists() or not path.exists():
            return None
        note = UploadNote.model_validate_json(note_path.read_text())
        return note if path.stat().st_size >= note.received_bytes else None

    def _received_bytes(self, version: int) -> int:
        note = self._note(version)
        return 0 if note is None else note.received_bytes

    def _refuse_hole(self, version: int, offset: int) -> None:
        path = self.path(version)
        if not path.exists() or path.stat().st_size < offset:
            raise self._misplaced(version, offset)

    def _misplaced(self, version: int, first_byte: int) -> ChunkMisplaced:
        message = f"{self._received_bytes(version)} bytes have arrived; go on from there"
        return ChunkMisplaced(FieldProblem(field="content-range", message=message, value=first_byte))

    def _write_note(self, version: int, note: UploadNote) -> None:
        write_durably(self._note_path(version), note.model_dump_json())

    def _note_path(self, version: int) -> Path:
        return self.folder / "uploads" / f"{version}.json"
