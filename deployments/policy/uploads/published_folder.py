"""Reads a folder in which a trainer publishes versions: which there are, whether each is whole, and its files.

A version is a subfolder whose name ends in its number. It is whole once its index is there, all files that the index
names are there, and each is as long as its header says; without an index, once its only file `model.safetensors` is. A
writer that writes the index last, or renames the subfolder, therefore publishes a version at once. Object stores show
whole objects alone.
"""

import hashlib
import json
import posixpath
import re
from typing import Any

import fsspec  # type: ignore[import-untyped]

from deployments.policy.uploads.publications import Publication
from rollout_client.weights.file_tensors import INDEX_FILE, MODEL_FILE
from rollout_client.weights.safetensors_file import NotSafetensors, read_header_of

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
        folders = subfolders(file_system, root)
        found = [
            self._look_at(file_system, version, folders[version]) for version in sorted(folders) if version > above
        ]
        self._seen = {publication.version: publication for publication in found}
        return found, max(folders, default=0)

    def _look_at(self, file_system: Any, version: int, paths: list[str]) -> Publication:
        location = f"{self._location}/{posixpath.basename(paths[0])}"
        if len(paths) > 1:
            names = " and ".join(sorted(posixpath.basename(path) for path in paths))
            return Publication(version, location, names, problem=f"two subfolders have its number, {names}")
        files = {posixpath.basename(entry["name"]): entry for entry in file_system.ls(paths[0], detail=True)}
        described = repr(sorted((name, sorted(entry.items(), key=str)) for name, entry in files.items()))
        fingerprint = hashlib.sha256(described.encode()).hexdigest()
        seen = self._seen.get(version)
        if seen is not None and (seen.fingerprint, seen.location) == (fingerprint, location):
            return seen
        base, missing, problem = None, None, None
        try:
            base, with_tensors = read_index(file_system, files)
            for name in with_tensors:
                read_header_at(file_system, files, name)
        except NotWhole as unfinished:
            missing = str(unfinished)
        except PublicationUnusable as error:
            problem = str(error)
        return Publication(version, location, fingerprint, base, missing, problem)


class NotWhole(Exception):
    """A file is not there yet, or not all of it."""


class PublicationUnusable(Exception):
    """The index is not one of a checkpoint or a delta."""


def subfolders(file_system: Any, root: str) -> dict[int, list[str]]:
    """Paths by the number in which they end; number 0 is that of the model that the service starts with."""
    folders: dict[int, list[str]] = {}
    for entry in file_system.ls(root, detail=True) if file_system.exists(root) else []:
        path = str(entry["name"]).rstrip("/")
        name = posixpath.basename(path)
        numbered = NUMBERED.fullmatch(name)
        if entry["type"] == "directory" and numbered is not None and not name.startswith(UNFINISHED):
            folders.setdefault(int(numbered[1]), []).append(path)
    folders.pop(0, None)
    return folders


def read_index(file_system: Any, files: dict[str, Any]) -> tuple[int | None, list[str]]:
    """The version that a delta changes, `None` of a checkpoint, and the names of the files with tensors.

    Raises:
        NotWhole: there is no index, or not all of it.
        PublicationUnusable: it does not say what it must.
    """
    if INDEX_FILE not in files:
        if MODEL_FILE in files:
            return None, [MODEL_FILE]
        raise NotWhole(f"{INDEX_FILE} is not there yet")
    try:
        index = json.loads(file_system.cat_file(files[INDEX_FILE]["name"]))
    except ValueError as error:
        raise NotWhole(f"{INDEX_FILE} is not JSON, or not all of it is there: {error}") from error
    try:
        names = sorted({str(name) for name in index["weight_map"].values()})
        metadata = index.get("metadata") or {}
        base = int(metadata["base_version"]) if "delta_encoding" in metadata else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PublicationUnusable(f"{INDEX_FILE} is not the index of a checkpoint or of a delta: {error!r}") from error
    if outside := [name for name in names if posixpath.basename(name) != name]:
        raise PublicationUnusable(f"{INDEX_FILE} names {outside[0]}, which does not lie in the folder")
    return base, names


def read_header_at(file_system: Any, files: dict[str, Any], name: str) -> None:
    """Raises `NotWhole` unless the file is there and as long as its header says."""
    if name not in files:
        raise NotWhole(f"{name} is not there yet")
    with file_system.open(files[name]["name"], "rb") as file:
        try:
            read_header_of(file, files[name]["size"], name)
        except NotSafetensors as error:
            raise NotWhole(str(error).removesuffix(".")) from error
