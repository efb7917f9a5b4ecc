"""The versions of one policy in a folder: which there are, which one is current, and their weights.

    versions.json                  every version, and which one is current: one file, replaced at once
    versions/7.safetensors         the full weights of version 7, or its adapter
    versions/8.delta.safetensors   the changes from version 7 to 8, until the full weights of 8 are written
    versions/0.safetensors         the model's checkpoint as one file (`InitialVersion`)
    making/9/                      files that are derived while version 9 is prepared
    names/run-b/                   the versions of a named policy, in the same layout

Guarantees: adding a version and making it current is one replacement of `versions.json`, so a store that is killed at
any write leaves the old version or the new one; files that `versions.json` does not name are removed at the next start.
Versions are numbered upward and never change. The current version is on disk when `make_current` returns. A delta is a
transport: it is stored only until its full weights are, its base stays as long, and no delta is stored above another.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Literal
from uuid import uuid4

from huggingface_hub import snapshot_download
from pydantic import BaseModel, Field

from deployments.policy.assembly import write_applied, write_checkpoint
from deployments.policy.commands import LoadedWeights
from deployments.policy.durable_files import Trash, flush, make_folder_durably, write_durably
from deployments.policy.failures import VersionRefused, VersionUnknown, WeightsRefused
from deployments.policy.weight_checks import layout_of
from rollout_client.contract.policy import PolicyLayout, VersionInfo
from rollout_client.weights.checksum import file_checksum

INDEX = "versions.json"


def initial_file(folder: Path) -> Path:
    """Where version 0 lies as one file, in the policy store's folder."""
    return folder / "versions" / "0.safetensors"


class InitialVersion:
    """Version 0: the checkpoint of the configured model, which every engine loads when it starts.

    Args:
        model: folder or hub name of the checkpoint.
        folder: the policy store's.
        max_lora_rank: as in `PolicyLayout`.
        revision: of a model of the Hub.
        draft: folder or hub name of the model that drafts, if there is one.
    """

    def __init__(
        self,
        model: str,
        folder: Path,
        max_lora_rank: int | None = None,
        revision: str | None = None,
        draft: str | None = None,
    ) -> None:
        self._model = model
        self._draft = draft
        self._revision = revision
        self._file = initial_file(folder)
        self._max_lora_rank = max_lora_rank
        self._making = Lock()

    @cached_property
    def layout(self) -> PolicyLayout:
        """The tensors of the model, which all full weights have; reads the disk, so ask for it in a thread.

        Raises:
            NotSafetensors: the model's folder holds no checkpoint.
        """
        draft = None if self._draft is None else _folder_of(self._draft)
        layout = layout_of(_folder_of(self._model, self._revision), draft)
        return layout.model_copy(update={"max_lora_rank": self._max_lora_rank})

    @cached_property
    def checksum(self) -> str:
        """Checksum of the initial weights. The first call reads all of `file`; call it from a thread."""
        return file_checksum(self.file())

    def file(self) -> Path:
        """One safetensors file with the initial weights, made at the first call; call it from a thread.

        Raises:
            WeightsRefused: the model's checkpoint cannot be read.
        """
        with self._making:
            if not self._file.exists():
                make_folder_durably(self._file.parent)
                beside = self._file.with_suffix(".new")
                write_checkpoint(_folder_of(self._model, self._revision), beside)
                flush(beside)
                beside.rename(self._file)
        return self._file


def _folder_of(model: str, revision: str | None = None) -> Path:
    """A checkpoint of the hub is downloaded, as the engines do."""
    if Path(model).is_dir():
        return Path(model)
    return Path(snapshot_download(model, revision=revision, allow_patterns=["*.safetensors*"]))


class Version(VersionInfo):
    """One version, as the store records it."""

    created_at: datetime
    key: str = Field(default_factory=lambda: uuid4().hex)
    """Identifies the content beyond its number: a replica that registers says which one it has loaded."""
    stored: Literal["whole", "delta", "nothing"] = "whole"
    """The weights in the folder: the whole of them, the changes since `base` until the whole is written, or, after a
    transfer, nothing."""
    upload_digest: str | None = None
    """The `weights_digest` of what was uploaded, which identifies a repeated upload."""
    adapter_config: str | None = None
    """Text of PEFT's `adapter_config.json`; adapters only."""
    delta_checksum: str | None = None
    """The `Checksum` of the delta's own tensors, if it came as a delta that the nodes apply."""


class _VersionIndex(BaseModel):
    """The content of `versions.json`."""

    current: int = 0
    """0, the weights of the configured model, until another version was made current."""
    taken: int = 0
    """The highest number that a replica was seen with, where that is above all that the store knows."""
    versions: dict[int, Version] = Field(default_factory=dict)


def read_index(folder: Path) -> _VersionIndex:
    """The versions in a folder; none if there is no index."""
    try:
        return _VersionIndex.model_validate_json((folder / INDEX).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return _VersionIndex()


class Versions:
    """The versions of one policy; its folder is used by one policy store only.

    Args:
        initial: version 0.
        root: the policy store's folder, whose trash takes what is discarded; by default `folder`.
    """

    def __init__(self, folder: Path, initial: InitialVersion, root: Path | None = None) -> None:
        self.folder = folder
        self.initial = initial
        self.trash = Trash(root or folder)
        self._index = read_index(folder)
        self._pending: Version | None = None
        """The version that an update under way loads into the replicas."""
        self._changing = Lock()
        self._making = Lock()
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Removes the files of changes that a store did not complete before it died."""
        self.trash.discard(self.folder / "making")
        named = {self.weights(0), *map(self._stored_file, self._index.versions)}
        for path in self.folder.glob("versions/*"):
            if path not in named:
                self.trash.discard(path)

    @property
    def current(self) -> int:
        """The version that is current on disk."""
        return self._index.current

    @property
    def updating_to(self) -> int | None:
        """The version that an update under way loads into the replicas."""
        return None if self._pending is None else self._pending.version

    @property
    def newest(self) -> int:
        """The highest number that is taken."""
        return max(self._index.current, self._index.taken, self.updating_to or 0)

    @property
    def all(self) -> list[Version]:
        """In order of their numbers, without version 0 and a version that is not current yet."""
        return [version for _, version in sorted(self._index.versions.items())]

    @property
    def desired(self) -> LoadedWeights:
        """The versions that every replica should hold: the current full weights and the current adapter, if any."""
        current = self.find(self.current)
        if current is None:
            return LoadedWeights()
        is_adapter = current.kind == "adapter"
        return LoadedWeights(current.base or 0, current.version) if is_adapter else LoadedWeights(current.version)

    def infos(self) -> list[VersionInfo]:
        """All versions as callers see them, version 0 first."""
        public = [
            VersionInfo(**{name: getattr(version, name) for name in VersionInfo.model_fields}) for version in self.all
        ]
        return [VersionInfo(version=0, kind="initial"), *public]

    def find(self, version: int) -> Version | None:
        """The version, if it is stored here or is being loaded by the replicas; `None` for version 0."""
        return self._index.versions.get(version) or (self._pending if self.updating_to == version else None)

    def info(self, version: int) -> Version:
        """Raises `VersionUnknown`."""
        found = self.find(version)
        if found is None:
            raise VersionUnknown.not_stored(version)
        return found

    def refuse_taken(self, version: int) -> None:
        """Raises `VersionRefused` if the number is taken."""
        if version <= self.newest:
            message = f"versions are numbered upward and {self.newest} is taken; the next is {self.newest + 1}"
            raise VersionRefused.of("version", message, version)

    def take(self, version: int) -> None:
        """Records a number that a replica has, so that it is not given to other weights."""
        if version > self.newest:
            self._change(lambda _: {"taken": version})

    @asynccontextmanager
    async def adding(self, version: Version, file: Path) -> AsyncIterator[None]:
        """Stores the weights for the block, which may call `make_current`; otherwise they are removed at the end.

        Args:
            file: on the same file system: the weights, or the delta if that is `version.stored`. A hard link is made of
                it, and it must not be written any more.

        Raises:
            VersionRefused: the number is taken.
        """
        number = version.version
        self.refuse_taken(number)
        self._pending = version
        try:
            place = self.delta(number) if version.stored == "delta" else self.weights(number)
            await asyncio.to_thread(self._place, file, place)
            yield
        finally:
            self._pending = None
            if self.current != number:
                self._discard(number)
            elif not self.is_delta(number):
                self.trash.discard(self.delta(number))

    def make_current(self, version: Version) -> None:
        """Records the version and makes it current. One without stored weights needs no `adding`."""

        number = version.version
        self._change(lambda kept: {"current": number, "versions": {**kept, number: version}})

    def note_published(self) -> None:
        """The current version is loaded by the replicas: its update has ended."""
        if self._pending is not None and self._pending.version == self.current:
            self._pending = None

    def keep_newest(self, full_versions: int, needed: Iterable[int]) -> None:
        """Removes all versions except the newest `full_versions` with full weights, those that are `needed`, and the
        bases of deltas among them."""
        full = [version.version for version in self.all if version.kind != "adapter" and version.stored != "nothing"]
        self.keep_only({*needed, *full[-full_versions:]})

    def keep_only(self, versions: Collection[int]) -> None:
        """Removes all other versions but the bases of deltas among them."""
        kept = {*versions, *(self.info(number).base for number in versions if self.is_delta(number))}
        if removed := [number for number in self._index.versions if number not in kept]:
            self._change(lambda all_: {"versions": {number: all_[number] for number in all_ if number in kept}})
        for number in removed:
            self._discard(number)

    def has_weights(self, version: int) -> bool:
        """False after a transfer until a replica has saved its weights."""
        if version == 0:
            return True
        found = self.find(version)
        return found is not None and found.stored != "nothing"

    def weights(self, version: int) -> Path:
        """Where the whole weights of the version are, or will be."""
        return self.folder / "versions" / f"{version}.safetensors"

    def delta(self, version: int) -> Path:
        """Where the changes are of a version that came as a delta."""
        return self.folder / "versions" / f"{version}.delta.safetensors"

    def is_delta(self, version: int) -> bool:
        """Whether of the version only the changes since its base are stored, yet."""
        return not self.weights(version).exists() and self.delta(version).exists()

    def _stored_file(self, version: int) -> Path:
        return self.delta(version) if self.is_delta(version) else self.weights(version)

    def _discard(self, version: int) -> None:
        self.trash.discard(self.weights(version))
        self.trash.discard(self.delta(version))

    def checksum(self, version: int) -> str:
        """The `Checksum` of a version that is stored with its weights; call it from a thread."""
        return str(self.info(version).checksum) if version else self.initial.checksum

    def file(self, version: int) -> Path:
        """The full weights, or an adapter. Call it from a thread: the first call writes those of version 0, and of a
        version that came as a delta.

        Raises:
            VersionUnknown: the weights are not stored, or no longer.
            WeightsRefused: the delta makes other weights than those that the version is known by.
        """
        if version == 0:
            return self.initial.file()
        if not self.has_weights(version):
            raise VersionUnknown.not_stored(version)
        if self.is_delta(version):
            with self._making:
                if self.is_delta(version):
                    self._write_full(self.info(version))
        return self.weights(version)

    def _write_full(self, info: Version) -> None:
        making = self.folder / "making" / f"{info.version}.safetensors"
        make_folder_durably(making.parent)
        try:
            checksum = write_applied(self.file(info.base or 0), self.delta(info.version), making)
            if checksum != info.checksum:
                message = f"the delta of version {info.base} makes weights with the checksum {checksum}"
                raise WeightsRefused.of("checksum", message, info.checksum)
            self.add_weights(info, making)
        finally:
            making.unlink(missing_ok=True)
        if self.updating_to != info.version:
            # Until its update has ended, nodes may still read the delta.
            self.trash.discard(self.delta(info.version))

    def add_weights(self, info: Version, weights: Path) -> None:
        """Stores the whole weights of a version that was recorded without; ignored if it was removed meanwhile.

        Args:
            info: the version as it is known now.
            weights: as `file` in `adding`.
        """
        number = info.version
        self._place(weights, self.weights(number))
        whole = info.model_copy(update={"stored": "whole"})
        if number in self._index.versions:
            self._change(lambda kept: {"versions": {**kept, number: whole}} if number in kept else {})
        if self.find(number) is None:
            self.trash.discard(self.weights(number))

    def are_same(self, one: int, other: int) -> bool:
        """Whether two versions have the same weights, as far as is known: a rollback has those of its origin."""
        one, other = self._origin(one), self._origin(other)
        checksums = [info.checksum for info in map(self.find, (one, other)) if info is not None]
        return one == other or (len(checksums) == 2 and checksums[0] == checksums[1] is not None)

    def _origin(self, version: int) -> int:
        while (info := self.find(version)) is not None and info.rollback_of is not None:
            version = info.rollback_of
        return version

    @contextmanager
    def workspace(self, version: int) -> Iterator[Path]:
        """A folder for files that are derived while `version` is prepared; removed at the end of the block."""
        folder = self.folder / "making" / str(version)
        make_folder_durably(folder)
        try:
            yield folder
        finally:
            self.trash.discard(folder)

    def _place(self, file: Path, place: Path) -> None:
        self.trash.discard(place)
        flush(file)
        make_folder_durably(place.parent)
        os.link(file, place)
        flush(place.parent)

    def _change(self, change: Callable[[Mapping[int, Version]], dict[str, Any]]) -> None:
        """Replaces the index by one with other fields, which follow from its versions."""
        with self._changing:
            if read_index(self.folder) != self._index:
                raise OSError(f"{self.folder} was changed by another policy store")
            try:
                changed = self._index.model_copy(update=change(self._index.versions))
                write_durably(self.folder / INDEX, changed.model_dump_json())
            finally:
                # Where the change was written, and could not be flushed, it has taken effect nevertheless.
                self._index = read_index(self.folder)
