"""Versions of the policy on disk: what a policy store reads back when it restarts.

    run.json                   the model and the run that the folder belongs to: `RunIdentity`
    current.json               which version is current
    tried.json                 versions above it that did not become current: refused, or cut off when a store died
    versions/7/info.json       what version 7 is
    versions/7/weights.safetensors    its full weights, or its adapter
    versions/7/delta.safetensors      of a version that is stored as a delta: what changed since its base
    checking/8/                files that are derived from the upload of version 8 while it is validated
    making/8/                  version 8 before it is complete
    making/7.safetensors       the full weights of a delta before they are complete
    removing/                  what is deleted by `Trash.empty`
    names/run-b/               the versions of a named policy, in a `VersionStore` of their own

Guarantees: a version is stored completely or not at all, and is on disk when `add` returns; a delta is complete with
its base, which `VersionHistory` keeps as long as the delta needs it; the current version is on disk when
`make_current` returns. Each of adding, making current and removing takes effect by one rename. Nothing here deletes
large files: they are discarded, and deleted by `trash.empty` in a thread. `write_durably`, `make_folder_durably` and
`flush` return once the change would survive a crash of the machine.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, Field

from deployments.policy.failures import VersionUnknown
from deployments.policy.versions.housekeeping import Trash
from rollout_client.contract.policy import VersionInfo


def write_durably(path: Path, text: str) -> None:
    """Replaces the file at once: after a crash it holds either the old text or the new one, whole."""
    make_folder_durably(path.parent)
    beside = path.with_suffix(".new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    flush(path.parent)


def make_folder_durably(folder: Path) -> None:
    """Makes the folder and its missing parents."""
    if not folder.is_dir():
        make_folder_durably(folder.parent)
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def flush(path: Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


WEIGHTS_FILE = "weights.safetensors"
DELTA_FILE = "delta.safetensors"


class StoredVersion(VersionInfo):
    created_at: datetime
    run: str | None = None
    """The training run that made it."""
    upload_digest: str | None = None
    """The `weights_digest` of what was uploaded, which identifies a repeated upload."""
    adapter_config: str | None = None
    """Text of PEFT's `adapter_config.json`; adapters only."""
    delta_checksum: str | None = None
    """The `Checksum` of the delta's own tensors; of a version that is stored as a delta."""


class TriedVersions(BaseModel):
    """The content of `tried.json`."""

    versions: list[StoredVersion] = Field(default_factory=list)
    loaded: list[int] = Field(default_factory=list)
    """Those of which a replica is known that has loaded them."""


@dataclass(frozen=True, slots=True)
class VersionStore:
    """All paths are under `folder`, which is used by one policy store only.

    Args:
        trash_folder: of the store whose `trash` takes what is discarded here; by default this one.
    """

    folder: Path
    trash_folder: Path | None = None

    @property
    def trash(self) -> Trash:
        return Trash(self.trash_folder or self.folder)

    @property
    def is_used(self) -> bool:
        """Whether it has, or had, any version but the initial one, of whatever policy."""
        return bool(self.current() or self.versions() or any(self.folder.glob("names/*/current.json")))

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

    def find(self, version: int) -> StoredVersion | None:
        """The version, if it is stored here."""
        try:
            text = (self._version_folder(version) / "info.json").read_text()
        except FileNotFoundError:
            return None
        return StoredVersion.model_validate_json(text)

    def info(self, version: int) -> StoredVersion:
        """Raises `VersionUnknown`."""
        found = self.find(version)
        if found is None:
            raise VersionUnknown.not_stored(version)
        return found

    def weights(self, version: int) -> Path:
        """Where the weights of the version are, if they are stored here as a whole."""
        return self._version_folder(version) / WEIGHTS_FILE

    def delta(self, version: int) -> Path:
        """Where the changes are, if the version is stored as a delta."""
        return self._version_folder(version) / DELTA_FILE

    def making_weights(self, version: int) -> Path:
        """Where the full weights of a delta are written before `add_weights`."""
        return self.folder / "making" / f"{version}.safetensors"

    def add(self, info: StoredVersion, file: Path | None) -> None:
        """Stores a version, in place of one of the same number that never became current.

        Args:
            file: on the same file system: the weights, or the delta if `info.delta_bytes` is its size. The version gets
                a hard link of it, and it must not be written any more; `None` if the service never held the weights.
        """
        making = self.folder / "making" / str(info.version)
        self._discard(making)
        make_folder_durably(making)
        if file is not None:
            flush(file)
            os.link(file, making / (WEIGHTS_FILE if info.delta_bytes is None else DELTA_FILE))
        write_durably(making / "info.json", info.model_dump_json())
        self.remove(info.version)
        folder = self._version_folder(info.version)
        make_folder_durably(folder.parent)
        making.rename(folder)
        flush(folder.parent)

    def add_weights(self, version: int, weights: Path, info: StoredVersion | None = None) -> None:
        """Stores the full weights of a version that was added without; ignored if it was removed meanwhile.

        Args:
            weights: as `file` in `add`.
            info: what is known of the version now, if that is more than when it was added.
        """
        flush(weights)
        try:
            if info is not None and info != self.info(version):
                write_durably(self._version_folder(version) / "info.json", info.model_dump_json())
            os.link(weights, self.weights(version))
        except (FileNotFoundError, FileExistsError, VersionUnknown):
            return
        flush(self._version_folder(version))

    def tried(self) -> TriedVersions:
        """Versions above the current one that did not become current, or not yet when an earlier store died."""
        path = self.folder / "tried.json"
        if not path.exists():
            return TriedVersions()
        tried, current = TriedVersions.model_validate_json(path.read_text()), self.current()
        return TriedVersions(
            versions=[info for info in tried.versions if info.version > current],
            loaded=[version for version in tried.loaded if version > current],
        )

    def keep_tried(self, version: int) -> None:
        """Notes that a replica has loaded this one of the versions that were tried."""
        tried = self.tried()
        if version not in tried.loaded:
            self._write_tried(TriedVersions(versions=tried.versions, loaded=[*tried.loaded, version]))

    def give_up(self, version: int) -> None:
        """Removes a version that does not become current; `tried` still knows what it was."""
        if (self._version_folder(version) / "info.json").exists():
            self._write_as_tried([self.info(version)])
        self.remove(version)

    def remove(self, version: int) -> None:
        self._discard(self._version_folder(version))

    def keep_only(self, versions: Iterable[int]) -> None:
        kept = set(versions)
        for info in self.versions():
            if info.version not in kept:
                self.remove(info.version)

    def remove_unfinished(self) -> None:
        """Removes what an earlier store left when it died: half-made files, and versions that never became current.

        Of the latter `tried` still knows what they were: a replica may have loaded one.
        """
        for name in ("making", "checking"):
            self._discard(self.folder / name)
        current, stored = self.current(), self.versions()
        # One without a file was being taken over from a replica, which serves it: no attempt has broken off.
        if unfinished := [info for info in stored if info.version > current and self._has_file(info.version)]:
            self._write_as_tried(unfinished)
        self.keep_only(info.version for info in stored if info.version <= current)

    def _has_file(self, version: int) -> bool:
        return self.weights(version).exists() or self.delta(version).exists()

    def _write_as_tried(self, versions: list[StoredVersion]) -> None:
        numbers = {info.version for info in versions}
        tried = self.tried()
        others = [info for info in tried.versions if info.version not in numbers]
        self._write_tried(TriedVersions(versions=[*others, *versions], loaded=tried.loaded))

    def _write_tried(self, tried: TriedVersions) -> None:
        write_durably(self.folder / "tried.json", tried.model_dump_json())

    @contextmanager
    def workspace(self, version: int) -> Iterator[Path]:
        """A folder for files that are derived while `version` is validated; removed at the end of the block."""
        folder = self.folder / "checking" / str(version)
        make_folder_durably(folder)
        try:
            yield folder
        finally:
            self._discard(folder)

    def _discard(self, path: Path) -> None:
        if path.exists():
            self.trash.discard(path)

    def _version_folder(self, version: int) -> Path:
        return self.folder / "versions" / str(version)


@dataclass(frozen=True, slots=True)
class KnownVersions:
    """The versions that a store knows.

    Args:
        current: the version that is current on disk.
        stored: by their numbers.
        tried: versions above the current one that were refused, or under way when a store died.
    """

    run: str
    current: int
    stored: Mapping[int, StoredVersion]
    tried: Mapping[int, StoredVersion]
