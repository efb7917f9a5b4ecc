"""The versions that a trainer publishes in a folder: which there are, which are whole, and which one is taken next.

`PublishedFolder` reads the folder. A version is a subfolder whose name ends in its number. It is whole once its index
is there, all files that the index names are there, and each is as long as its header says; without an index, once its
only file `model.safetensors` is. A writer that writes the index last, or renames the subfolder, publishes a version at
once. Object stores show whole objects alone.

`Publications` is a state machine without I/O. A version holds a whole checkpoint, or, as a delta, the changed bytes
since an earlier version. So it is made of a chain: weights that are held here, or a whole checkpoint of the folder, and
the deltas that follow. Guarantees: the newest version that can be made is taken, and each at most once; a delta is
applied only to the version that it names as its base, and that came from the same folder or is version 0; what was
refused is not tried again before its files have changed; numbers not above the current version are never taken.
"""

import hashlib
import json
import posixpath
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import fsspec  # type: ignore[import-untyped]

from rollout_client.contract.policy import FollowState, RefusedPublication
from rollout_client.weights.file_tensors import INDEX_FILE, MODEL_FILE
from rollout_client.weights.safetensors_file import NotSafetensors, read_header_of

MOST_REFUSED = 16
"""Refusals that are remembered; those of higher numbers."""


@dataclass(frozen=True, slots=True)
class Publication:
    """One version of the folder, as it was found."""

    version: int
    location: str
    """Path or URL of its subfolder."""
    fingerprint: str = ""
    """Changes when its files do."""
    base: int | None = None
    """The version that it is a delta of; `None` of a whole checkpoint."""
    missing: str | None = None
    """Why it is not whole yet; `None` if it is."""
    problem: str | None = None
    """Why it can never be used as it is; `None` if nothing is known against it."""


@dataclass(frozen=True, slots=True)
class PublishedChain:
    """How the weights of one version are made."""

    version: int
    seed: int | None
    """The version with whose stored weights the chain begins; `None` if its first link is a whole checkpoint."""
    links: tuple[Publication, ...]
    """In the order in which they are applied; the last one is the version itself."""

    @property
    def source(self) -> str:
        return self.links[-1].location


@dataclass(frozen=True, slots=True)
class _Refusal:
    fingerprint: str
    reason: str
    is_broken: bool
    """Whether its bytes cannot be used, also as a link to a later version."""


@dataclass(frozen=True, slots=True)
class HeldVersions:
    """The versions of the service.

    Args:
        current: the version that is current.
        taken: the newest that came from the folder; 0 if none did.
        with_weights: those whose full weights are stored, and came from the folder or are version 0.
    """

    current: int = 0
    taken: int = 0
    with_weights: Collection[int] = (0,)


@dataclass
class Publications:
    """The versions of one folder.

    Args:
        takes_deltas: whether its format has them.
    """

    takes_deltas: bool
    _found: dict[int, Publication] = field(default_factory=dict)
    _newest: int = 0
    _refused: dict[int, _Refusal] = field(default_factory=dict)
    waiting: str | None = None
    """Why the newest version is not taken; of the last call of `next`."""

    def observe(self, publications: Iterable[Publication], newest: int) -> list[RefusedPublication]:
        """Records what is in the folder now; returns the versions that are refused at once.

        Args:
            publications: those that may be of use, at least all above the newest one that was taken.
            newest: the highest number in the folder.
        """
        self._found = {publication.version: publication for publication in publications}
        self._newest = newest
        for version, refusal in list(self._refused.items()):
            found = self._found.get(version)
            if found is not None and found.fingerprint != refusal.fingerprint:
                del self._refused[version]
        problems = {found: self._problem_of(found) for found in self._found.values()}
        return [
            self.refuse(found, problem, is_broken=True)
            for found, problem in problems.items()
            if problem is not None and found.version not in self._refused
        ]

    def refuse(self, publication: Publication, reason: str, is_broken: bool) -> RefusedPublication:
        """Does not try the version again before its files have changed.

        Args:
            is_broken: whether no later version can be made with it either.
        """
        self._refused[publication.version] = _Refusal(publication.fingerprint, reason, is_broken)
        for version in sorted(self._refused)[:-MOST_REFUSED]:
            del self._refused[version]
        return RefusedPublication(version=publication.version, reason=reason)

    def next(self, held: HeldVersions) -> PublishedChain | None:
        """How the newest version is made that can be; `None` if there is none above the current one."""
        self.waiting = self._behind(held)
        for version in sorted(self._found, reverse=True):
            if version <= held.current:
                break
            chain = self._chain(self._found[version], held.with_weights)
            if isinstance(chain, PublishedChain):
                return chain
            if version == self._newest:
                self.waiting = chain
        return None

    def state(self, folder: str, held: HeldVersions) -> FollowState:
        refused = [
            RefusedPublication(version=version, reason=refusal.reason)
            for version, refusal in sorted(self._refused.items())
        ]
        return FollowState(folder=folder, taken=held.taken, newest=self._newest, waiting=self.waiting, refused=refused)

    def _behind(self, held: HeldVersions) -> str | None:
        """Why the newest number of the folder is none that can be taken, if it is not above the current one."""
        if not self._newest:
            return "the folder is not there, or has no version yet: no subfolder whose name ends in a number"
        if self._newest > held.current or self._newest == held.taken:
            return None
        return (
            f"the folder's newest version is {self._newest}, and {held.current} is current. Numbers only go up: "
            f"publish from {held.current + 1} on, or give a new run a service with another policy.run"
        )

    def _chain(self, target: Publication, held: Collection[int]) -> PublishedChain | str:
        """The chain to `target`, or why there is none."""
        if (refusal := self._refused.get(target.version)) is not None:
            return f"version {target.version} is refused: {refusal.reason}"
        links = [target]
        while (obstacle := self._obstacle(links[0])) is None:
            base = links[0].base
            if base is None or base in held:
                return PublishedChain(target.version, base, tuple(links))
            if base not in self._found:
                obstacle = (
                    f"it is a delta of version {base}, which is neither in the folder nor stored with its weights "
                    "(policy.keep_versions); publish a whole checkpoint"
                )
                break
            links.insert(0, self._found[base])
        link = links[0].version
        needed = f"version {target.version} needs version {link}" if links[1:] else f"version {link}"
        return f"{needed}: {obstacle}"

    def _obstacle(self, link: Publication) -> str | None:
        """Why no version can be made with the link now."""
        refusal = self._refused.get(link.version)
        return refusal.reason if refusal is not None and refusal.is_broken else link.missing

    def _problem_of(self, found: Publication) -> str | None:
        """Why no version can ever be made with it as it is."""
        if found.base is not None and not self.takes_deltas:
            return "it is a delta, which policy.follow.format: miles_disk_delta takes"
        if found.base is not None and found.base >= found.version:
            return f"it is a delta of version {found.base}, which does not come before it"
        return found.problem


NUMBERED = re.compile(r"(?:.*\D)?(\d{1,18})")
UNFINISHED = (".", "_", "tmp")
"""Names of subfolders that writers rename when they are whole begin so."""


class PublishedFolder:
    """One folder on a file system of fsspec.

    Args:
        location: path or fsspec URL.
    """

    def __init__(self, location: str) -> None:
        self._location = location.rstrip("/")
        self._seen: dict[int, Publication] = {}

    def look(self, above: int) -> tuple[list[Publication], int]:
        """The versions with higher numbers than `above`, and the highest number in the folder; 0 without any.

        Call it from a thread. Reads only subfolders whose files have changed since the last call.

        Raises:
            Exception: what the file system raises.
        """
        file_system, root = fsspec.core.url_to_fs(str(self._location))
        file_system.invalidate_cache()
        folders = _subfolders(file_system, root)
        found = [
            self._look_at(file_system, version, folders[version]) for version in sorted(folders) if version > above
        ]
        self._seen = {publication.version: publication for publication in found}
        return found, max(folders, default=0)

    def _look_at(self, file_system: Any, version: int, path: str) -> Publication:
        location = f"{self._location}/{posixpath.basename(path)}"
        files = {posixpath.basename(entry["name"]): entry for entry in file_system.ls(path, detail=True)}
        described = repr(sorted((name, sorted(entry.items(), key=str)) for name, entry in files.items()))
        fingerprint = hashlib.sha256(described.encode()).hexdigest()
        seen = self._seen.get(version)
        if seen is not None and (seen.fingerprint, seen.location) == (fingerprint, location):
            return seen
        base, missing, problem = None, None, None
        try:
            base, with_tensors = read_index(file_system, files)
            for name in with_tensors:
                _read_header_at(file_system, files, name)
        except _NotWhole as unfinished:
            missing = str(unfinished)
        except _PublicationUnusable as error:
            problem = str(error)
        return Publication(version, location, fingerprint, base, missing, problem)


class _NotWhole(Exception):
    """A file is not there yet, or not all of it."""


class _PublicationUnusable(Exception):
    """The index is not one of a checkpoint or a delta."""


def _subfolders(file_system: Any, root: str) -> dict[int, str]:
    """Paths by the number in which they end; number 0 is that of the model that the service starts with."""
    folders: dict[int, str] = {}
    for entry in file_system.ls(root, detail=True) if file_system.exists(root) else []:
        path = str(entry["name"]).rstrip("/")
        name = posixpath.basename(path)
        numbered = NUMBERED.fullmatch(name)
        if entry["type"] == "directory" and numbered is not None and not name.startswith(UNFINISHED):
            folders[int(numbered[1])] = path
    folders.pop(0, None)
    return folders


def read_index(file_system: Any, files: dict[str, Any]) -> tuple[int | None, list[str]]:
    """The version that a delta changes, `None` of a checkpoint, and the names of the files with tensors.

    Raises:
        _NotWhole: there is no index, or not all of it.
        _PublicationUnusable: it does not say what it must.
    """
    if INDEX_FILE not in files:
        if MODEL_FILE in files:
            return None, [MODEL_FILE]
        raise _NotWhole(f"{INDEX_FILE} is not there yet")
    try:
        index = json.loads(file_system.cat_file(files[INDEX_FILE]["name"]))
    except ValueError as error:
        raise _NotWhole(f"{INDEX_FILE} is not JSON, or not all of it is there: {error}") from error
    try:
        names = sorted({str(name) for name in index["weight_map"].values()})
        metadata = index.get("metadata") or {}
        base = int(metadata["base_version"]) if "delta_encoding" in metadata else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _PublicationUnusable(f"{INDEX_FILE} is not the index of a checkpoint or of a delta: {error!r}") from error
    if outside := [name for name in names if posixpath.basename(name) != name]:
        raise _PublicationUnusable(f"{INDEX_FILE} names {outside[0]}, which does not lie in the folder")
    return base, names


def _read_header_at(file_system: Any, files: dict[str, Any], name: str) -> None:
    """Raises `_NotWhole` unless the file is there and as long as its header says."""
    if name not in files:
        raise _NotWhole(f"{name} is not there yet")
    with file_system.open(files[name]["name"], "rb") as file:
        try:
            read_header_of(file, files[name]["size"], name)
        except NotSafetensors as error:
            raise _NotWhole(str(error).removesuffix(".")) from error
