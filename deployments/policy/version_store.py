"""Versions of the policy on disk: what must be known after the policy store has died.

    current.json               which version is current
    versions/7/info.json       what version 7 is
    versions/7/weights.safetensors
    checking/8/                what is made of version 8 before it is one
    uploads/8.part, 8.json     what has arrived of version 8, and how much of it counts

A version is complete or not there: it is moved into place in one step, made current in another, and moved away in one.
"""

import json
import os
import shutil
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from deployments.policy.failures import ChunkMisplaced, VersionUnknown
from rollout_client.policy_contract import UploadState, VersionInfo
from rollout_client.problem_contract import FieldProblem

WEIGHTS_FILE = "weights.safetensors"


class StoredVersion(VersionInfo):
    """`upload_digest` is the sha-256 (hex) of the bytes that were uploaded, to know a repeated upload again."""

    upload_digest: str | None = None
    adapter_config: str | None = None


class Upload(BaseModel):
    """What counts of an upload's bytes, and how long it will be, once that is known."""

    received_bytes: int = 0
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class VersionStore:
    """All paths are under `folder`, which belongs to one policy store."""

    folder: Path

    def current(self) -> int:
        """0, the weights of the configured model, until another version was made current."""
        path = self.folder / "current.json"
        return int(json.loads(path.read_text())["version"]) if path.exists() else 0

    def make_current(self, version: int) -> None:
        write_durably(self.folder / "current.json", json.dumps({"version": version}))

    def versions(self) -> list[StoredVersion]:
        """In order of their numbers."""
        infos = [
            StoredVersion.model_validate_json(path.read_text()) for path in self.folder.glob("versions/*/info.json")
        ]
        return sorted(infos, key=lambda info: info.version)

    def info(self, version: int) -> StoredVersion:
        """Raises `VersionUnknown`."""
        try:
            text = (self._version_folder(version) / "info.json").read_text()
        except FileNotFoundError:
            problem = FieldProblem(field="version", message="it is not stored here, or no longer", value=version)
            raise VersionUnknown(problem) from None
        return StoredVersion.model_validate_json(text)

    def weights(self, version: int) -> Path:
        return self._version_folder(version) / WEIGHTS_FILE

    def put(self, info: StoredVersion, weights: Path | None) -> None:
        """Moves `weights` in, which must lie on the same file system; a version without was never held here."""
        making = self.folder / "making" / str(info.version)
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        if weights is not None:
            flush(weights)
            weights.rename(making / WEIGHTS_FILE)
        write_durably(making / "info.json", info.model_dump_json())
        # A version of this number that never became current: an update that failed.
        self.remove(info.version)
        folder = self._version_folder(info.version)
        folder.parent.mkdir(parents=True, exist_ok=True)
        making.rename(folder)
        flush(folder.parent)

    @contextmanager
    def workspace(self, version: int) -> Iterator[Path]:
        """A folder for what is made of `version` before it is put here; it goes with the block."""
        folder = self.folder / "checking" / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def remove(self, version: int) -> None:
        folder = self._version_folder(version)
        if folder.exists():
            removing = self.folder / "removing" / str(version)
            shutil.rmtree(removing, ignore_errors=True)
            removing.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(removing)
            shutil.rmtree(removing, ignore_errors=True)

    def keep_only(self, versions: Iterable[int]) -> None:
        kept = set(versions)
        for info in self.versions():
            if info.version not in kept:
                self.remove(info.version)

    def sweep(self) -> None:
        """Removes what a store that died left half done; uploads that can go on stay."""
        for name in ("making", "removing", "checking"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        current = self.current()
        self.keep_only(info.version for info in self.versions() if info.version <= current)
        self.drop_uploads_up_to(current)
        for path in self.folder.glob("uploads/*"):
            if path.suffix not in (".part", ".json") or self._upload(int(path.stem)) is None:
                path.unlink()

    def upload_state(self, version: int) -> UploadState:
        """Raises `VersionUnknown` if nothing of it has arrived."""
        upload = self._upload(version)
        if upload is None:
            raise VersionUnknown(
                FieldProblem(
                    field="version", message="nothing of it has arrived; begin at its first byte", value=version
                )
            )
        return UploadState(version=version, received_bytes=upload.received_bytes, total_bytes=upload.total_bytes)

    def begin_chunk(self, version: int, first_byte: int) -> None:
        """What had arrived from `first_byte` on counts no more; at 0 the upload begins anew.

        Raises:
            ChunkMisplaced: the piece begins beyond what has arrived.
        """
        received = self._received_bytes(version)
        if first_byte > received:
            raise self._misplaced(version, first_byte)
        path = self.upload_path(version)
        path.parent.mkdir(parents=True, exist_ok=True)
        if first_byte < received or first_byte == 0:
            self._note_upload(version, Upload(received_bytes=first_byte))
        with path.open("ab") as file:
            file.truncate(first_byte)

    def write_chunk(self, version: int, offset: int, data: bytes) -> None:
        """What is written counts only once `end_chunk` says so.

        Raises:
            ChunkMisplaced: another sender has begun the upload anew, or it was dropped.
        """
        self._refuse_hole(version, offset)
        with self.upload_path(version).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def end_chunk(self, version: int, end: int, total_bytes: int | None) -> UploadState:
        """Raises what `write_chunk` raises."""
        self._refuse_hole(version, end)
        os.truncate(self.upload_path(version), end)
        self._note_upload(version, Upload(received_bytes=end, total_bytes=total_bytes))
        return self.upload_state(version)

    def upload_path(self, version: int) -> Path:
        return self.folder / "uploads" / f"{version}.part"

    def drop_upload(self, version: int) -> None:
        self.upload_path(version).unlink(missing_ok=True)
        self._upload_note(version).unlink(missing_ok=True)

    def drop_uploads_up_to(self, version: int, but: Container[int] = ()) -> None:
        for path in self.folder.glob("uploads/*.json"):
            uploaded = int(path.stem)
            if uploaded <= version and uploaded not in but:
                self.drop_upload(uploaded)

    def _upload(self, version: int) -> Upload | None:
        """`None` also where bytes are gone that had counted: the machine stopped, or they became a version."""
        note, path = self._upload_note(version), self.upload_path(version)
        if not note.exists() or not path.exists():
            return None
        upload = Upload.model_validate_json(note.read_text())
        return upload if path.stat().st_size >= upload.received_bytes else None

    def _received_bytes(self, version: int) -> int:
        upload = self._upload(version)
        return 0 if upload is None else upload.received_bytes

    def _refuse_hole(self, version: int, offset: int) -> None:
        path = self.upload_path(version)
        if not path.exists() or path.stat().st_size < offset:
            raise self._misplaced(version, offset)

    def _misplaced(self, version: int, first_byte: int) -> ChunkMisplaced:
        message = f"{self._received_bytes(version)} bytes have arrived; go on from there"
        return ChunkMisplaced(FieldProblem(field="content-range", message=message, value=first_byte))

    def _note_upload(self, version: int, upload: Upload) -> None:
        write_durably(self._upload_note(version), upload.model_dump_json())

    def _upload_note(self, version: int) -> Path:
        return self.folder / "uploads" / f"{version}.json"

    def _version_folder(self, version: int) -> Path:
        return self.folder / "versions" / str(version)


def write_durably(path: Path, text: str) -> None:
    """All of it or nothing, also where the machine stops midway."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """What a file or folder holds is on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
