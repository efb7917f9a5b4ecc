"""From what arrived to one safetensors file with all tensors, ready to be validated.

What arrives is a file with all tensors or some, what changed since an older version, a zstd stream, or a folder with a
checkpoint or an adapter. No pickle is ever read. Memory holds one block of one tensor at a time, or, where a delta is
applied, a tensor for each of `MOST_THREADS`.

Guarantee: of checkpoints that the service reads itself, from a path or an fsspec URL, nothing outside the configured
roots is read, whatever dots and symbolic links a location contains.
"""

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

import fsspec  # type: ignore[import-untyped]
import numpy as np
import zstandard

from deployments.policy.failures import SourceRefused, WeightsRefused
from deployments.policy.weight_checks import too_large
from rollout_client.weights.checksum import Checksum
from rollout_client.weights.delta import BadDelta, apply_changes, as_bits, delta_entries, read_changes
from rollout_client.weights.file_tensors import adapter_weights, file_tensors
from rollout_client.weights.safetensors_file import (
    Header,
    NotSafetensors,
    TensorEntry,
    header_bytes,
    header_of,
    read_header,
    read_header_bytes,
    tensor_blocks,
)

BLOCK_BYTES = 2**20
MOST_THREADS = 4
"""An engine computes on the same cores meanwhile."""
BASE_REMOVED = "newer versions have taken the place of the base; send full weights"
LARGEST_WINDOW_BYTES = 2**27
"""Memory that a zstd stream may ask for; what `zstd` itself allows by default, at every level up to 19."""


def write_completed(base: Path, partial: Path, full: Path) -> None:
    """Writes the tensors of `partial`, and under all other names those of `base`.

    Args:
        partial: has no names, dtypes and shapes but those of `base`.

    Raises:
        WeightsRefused: the base was removed meanwhile.
    """
    header = read_header(partial)
    sent = header.by_name
    try:
        base_header = read_header(base)
        with full.open("wb") as file:
            file.write(header_bytes(base_header.entries, base_header.metadata))
            for entry in base_header.entries:
                source = (partial, header, sent[entry.name]) if entry.name in sent else (base, base_header, entry)
                file.writelines(tensor_blocks(*source))
    except FileNotFoundError as error:
        raise WeightsRefused.of("base", BASE_REMOVED) from error


def write_applied(base: Path, delta: Path, full: Path) -> str:
    """Writes the full weights that `delta` makes of `base`, and returns their `Checksum`.

    They have the header of `base` as it is, and so its size. Several threads, a tensor each, read the base once, and
    write and hash the result once.

    Raises:
        WeightsRefused: the delta does not fit its base, or the base was removed meanwhile.
    """
    checksum = Checksum()
    try:
        header, delta_header = read_header(base), read_header(delta)
        changed = delta_entries(delta_header, header.by_name)

        def make(entry: TensorEntry) -> None:
            begin = header.data_begin + entry.begin
            data = np.fromfile(base, np.uint8, entry.size_bytes, offset=begin)
            if entry.name in changed:
                changes = read_changes(delta, delta_header, changed[entry.name])
                apply_changes(entry.name, as_bits(entry.dtype, data.data), changes)
            checksum.add(entry.name, entry.dtype, entry.shape, [data.data])
            with full.open("r+b") as file:
                file.seek(begin)
                file.write(data.data)

        full.write_bytes(read_header_bytes(base, header))
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MOST_THREADS)) as threads:
            list(threads.map(make, header.entries))
    except (BadDelta, NotSafetensors) as error:
        raise WeightsRefused.of("weights", str(error).removesuffix(".")) from error
    except FileNotFoundError as error:
        raise WeightsRefused.of("base", BASE_REMOVED) from error
    return checksum.hexdigest()


def write_checkpoint(checkpoint: Path, full: Path) -> None:
    """Writes the tensors of a checkpoint, a file or a folder of them, as one file.

    Raises:
        WeightsRefused: the checkpoint cannot be read.
    """
    try:
        tensors = file_tensors(checkpoint)
        header = header_of((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        with full.open("wb") as file:
            file.write(header_bytes(header.entries, {"format": "pt"}))
            for tensor in tensors.values():
                file.writelines(tensor.blocks(tensor.dtype))
    except (ValueError, OSError) as error:
        raise WeightsRefused.of("weights", str(error).removesuffix(".")) from error


def write_renamed(pushed: Path, header: Header, names: Mapping[str, str], renamed: Path) -> None:
    """Writes the tensors of `pushed` under other names: by the name of each tensor its new one."""
    new = header_of(((names[entry.name], entry.dtype, entry.shape) for entry in header.entries), header.metadata)
    with renamed.open("wb") as file:
        file.write(header_bytes(new.entries, header.metadata))
        for entry in header.entries:
            file.writelines(tensor_blocks(pushed, header, entry))


def write_adapter(folder: Path, packed: Path) -> None:
    """Writes the tensors and the configuration in a PEFT adapter's folder as one file.

    Raises:
        WeightsRefused: the folder holds no adapter.
    """
    try:
        with packed.open("wb") as file:
            file.writelines(adapter_weights(folder).blocks())
    except (ValueError, OSError) as error:
        raise WeightsRefused.of("weights", str(error).removesuffix(".")) from error


class NotZstd(WeightsRefused):
    """The bytes are not a zstd stream: they never were, or were damaged."""


def unpack_zstd(packed: Path, unpacked: Path, most_bytes: int) -> None:
    """Decompresses a file.

    Raises:
        NotZstd: it is not a zstd stream.
        WeightsRefused: it decompresses to more than `most_bytes`; no more is written then.
    """
    try:
        with packed.open("rb") as source, unpacked.open("wb") as target:
            decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW_BYTES)
            reader = decompressor.stream_reader(source, read_across_frames=True)
            while block := reader.read(BLOCK_BYTES):
                if target.tell() + len(block) > most_bytes:
                    raise too_large(most_bytes)
                target.write(block)
    except zstandard.ZstdError as error:
        message = f"the bytes are not a zstd stream, as Content-Encoding says: {error}"
        raise NotZstd.of("weights", message) from error


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
    if isinstance(error, FileNotFoundError):
        return "nothing is there"
    if isinstance(error, ValueError):
        return f"ValueError: {error}"
    return str(getattr(error, "strerror", None) or type(error).__name__)
