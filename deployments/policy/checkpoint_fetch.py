"""Checkpoints that the service reads itself, from a path or an fsspec URL.

Guarantee: nothing outside the configured roots is read, whatever dots and symbolic links a location contains.
"""

import posixpath
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import fsspec  # type: ignore[import-untyped]

from deployments.policy.failures import SourceRefused

SUFFIXES = (".safetensors", ".json")
"""Endings of the files in a checkpoint's folder that are read."""
NO_ROOTS = "none is configured; policy.checkpoint_roots of the service's config names them"


def fetch_checkpoint(location: str, roots: Sequence[str], folder: Path) -> Path:
    """Where the checkpoint is on this machine; one behind a URL is downloaded to `folder`.

    Args:
        location: path or fsspec URL of a file or a folder.
        roots: paths and fsspec URLs; the checkpoint must lie under one of them.

    Raises:
        SourceRefused: it lies outside the roots, or cannot be read.
    """
    try:
        place = _normalized(location)
        _refuse_outside([place], roots, location)
        if _is_url(place):
            return download(place, folder)
        _refuse_outside(map(_normalized, _files_of(Path(place))), roots, location)
        return Path(place)
    except SourceRefused:
        raise
    except Exception as error:
        # Each file system of fsspec raises errors of its own.
        raise SourceRefused.of("checkpoint", f"it cannot be read: {_reason_of(error)}", location) from error


def _refuse_outside(places: Iterable[str], roots: Sequence[str], location: str) -> None:
    """Raises `SourceRefused` if one of `places`, which are normalized, lies under none of the roots."""
    prefixes = [_normalized(root).rstrip("/") for root in roots]
    for place in places:
        if not any(place == prefix or place.startswith(f"{prefix}/") for prefix in prefixes):
            allowed = "policy.checkpoint_roots of the service's config" if roots else NO_ROOTS
            raise SourceRefused.of(
                "checkpoint", f"it lies outside the roots that weights may be read from ({allowed})", location
            )


def _files_of(place: Path) -> list[str]:
    """The files that will be read, each of which may be a symbolic link.

    Raises:
        FileNotFoundError: nothing is there.
    """
    if not place.exists():
        raise FileNotFoundError(place)
    if not place.is_dir():
        return [str(place)]
    return [str(file) for file in place.iterdir() if file.suffix in SUFFIXES]


def download(url: str, folder: Path) -> Path:
    """Raises what the file system of `url` raises, and `FileNotFoundError` if no checkpoint is there."""
    file_system, path = fsspec.core.url_to_fs(url)
    folder.mkdir(parents=True, exist_ok=True)
    if file_system.isfile(path):
        file = folder / str(posixpath.basename(path))
        file_system.get_file(path, str(file))
        return file
    found = [name for name in file_system.find(path, maxdepth=1) if posixpath.splitext(name)[1] in SUFFIXES]
    if not found:
        raise FileNotFoundError(url)
    for name in found:
        file_system.get_file(name, str(folder / posixpath.basename(name)))
    return folder


def _normalized(location: str) -> str:
    """Resolves `.`, `..`, symbolic links and `file://`, so that comparing the text with a root is safe.

    Raises:
        ValueError, RuntimeError: it is not a path, or its symbolic links form a circle.
    """
    if not _is_url(location):
        return str(Path(location.removeprefix("file://")).resolve())
    parts = urlsplit(location)
    if ".." in unquote(parts.path).split("/") and ".." not in parts.path.split("/"):
        raise ValueError("dots that lead upward are spelt as they are")
    return f"{parts.scheme}://{parts.netloc}{posixpath.normpath(parts.path or '/')}"


def _is_url(location: str) -> bool:
    return "://" in location and not location.startswith("file://")


def _reason_of(error: Exception) -> str:
    """Without the path that the location turned out to be, which is in the messages of the system."""
    match error:
        case FileNotFoundError():
            return "nothing is there"
        case OSError(strerror=str(reason)):
            return reason
        case ValueError():
            return f"ValueError: {error}"
        case _:
            return type(error).__name__
