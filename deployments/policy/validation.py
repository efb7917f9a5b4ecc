"""From what arrived to weights that may be served: everything that can be wrong with them is found here.

Nothing of a pickle is ever read, and memory holds one block of one tensor at a time (of a delta, one tensor).
"""

import hashlib
import json
import math
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import fsspec  # type: ignore[import-untyped]
import numpy as np
import zstandard

from deployments.policy.failures import SourceRefused, WeightsRefused
from rollout_client.policy_contract import PolicyLayout, TensorLayout
from rollout_client.problem_contract import FieldProblem
from rollout_client.weights.delta import BadDelta, applied
from rollout_client.weights.safetensors_file import (
    DTYPE_BYTES,
    LONGEST_HEADER_BYTES,
    Checksum,
    Data,
    Header,
    NotSafetensors,
    TensorEntry,
    header_bytes,
    header_of,
    read_header,
    tensor_blocks,
)
from rollout_client.weights.sources import adapter_weights, file_tensors

MOST_SHOWN = 5
GAP_BYTES = 4
FETCHED = (".safetensors", ".json")
"""What of a checkpoint's folder is read."""
EXPONENTS: dict[str, tuple[str, int]] = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F8_E5M2": ("<u1", 0x7C),
    "F8_E4M3": ("<u1", 0x7F),
    "F8_E8M0": ("<u1", 0xFF),
    "C64": ("<u4", 0x7F80_0000),
}
"""How a dtype is read as integers, and which of their bits are all set in NaN and infinity alone."""


def layout_of(model_folder: Path) -> PolicyLayout:
    """The tensors of the checkpoint that the engine begins with.

    Raises:
        NotSafetensors: the folder holds no such checkpoint.
    """
    tensors = file_tensors(model_folder)
    return PolicyLayout(
        tensors={name: TensorLayout(dtype=tensor.dtype, shape=list(tensor.shape)) for name, tensor in tensors.items()}
    )


def checked_full(path: Path, layout: PolicyLayout) -> str:
    """The `Checksum` of full weights that can be served; raises `WeightsRefused`."""
    header = readable_header(path)
    if problems := list(layout_problems(header, layout)):
        raise WeightsRefused(*problems)
    return finite_checksum(path, header)


def checked_adapter(path: Path) -> tuple[str, str]:
    """Checksum and configuration (JSON) of a LoRA adapter; raises `WeightsRefused`."""
    header = readable_header(path)
    adapter_config = header.metadata.get("adapter_config", "")
    try:
        is_object = isinstance(json.loads(adapter_config), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise weights_refused("the file's metadata hold no adapter_config, the text of PEFT's adapter_config.json")
    if not header.entries:
        raise weights_refused("the adapter holds no tensor")
    return finite_checksum(path, header), adapter_config


def finite_checksum(path: Path, header: Header) -> str:
    checksum = Checksum()
    for entry in header.entries:
        checksum.add(entry.name, entry.dtype, entry.shape, finite_blocks(path, header, entry))
    return checksum.hexdigest()


def finite_blocks(path: Path, header: Header, entry: TensorEntry) -> Iterator[bytes]:
    for block in tensor_blocks(path, header, entry):
        if holds_non_finite(entry.dtype, block):
            raise weights_refused("it holds NaN or infinity; the training has gone astray", entry.name)
        yield block


def holds_non_finite(dtype: str, block: Data) -> bool:
    if dtype not in EXPONENTS:
        return False
    as_integers, exponent = EXPONENTS[dtype]
    return bool(np.any((np.frombuffer(block, as_integers) & exponent) == exponent))


def most_bytes_of(layout: PolicyLayout) -> int:
    """At least what any weights of the model can have, a delta of all its values included."""
    values = ((math.prod(tensor.shape), DTYPE_BYTES[tensor.dtype]) for tensor in layout.tensors.values())
    return LONGEST_HEADER_BYTES + sum(count * (value_bytes + GAP_BYTES) for count, value_bytes in values)


def too_large(most_bytes: int) -> WeightsRefused:
    return weights_refused(f"they are more than {most_bytes} bytes, more than weights of this model can be")


def layout_problems(header: Header, layout: PolicyLayout) -> Iterator[FieldProblem]:
    there = header.by_name
    for title, names in {
        "missing": [name for name in layout.tensors if name not in there],
        "not known to the model": [name for name in there if name not in layout.tensors],
    }.items():
        for name in names[:MOST_SHOWN]:
            more = f", like {len(names) - 1} more" if len(names) > 1 else ""
            yield FieldProblem(field=name, message=f"the tensor is {title}{more}")
    different = [
        finding
        for name, due in layout.tensors.items()
        if name in there and (finding := difference(there[name], due)) is not None
    ]
    yield from different[:MOST_SHOWN]
    if len(different) > MOST_SHOWN:
        yield FieldProblem(field="weights", message=f"{len(different) - MOST_SHOWN} more tensors are different")


def difference(there: TensorEntry, due: TensorLayout) -> FieldProblem | None:
    findings = [
        f"its {what} is {is_so}; the model's is {is_due}"
        for what, is_so, is_due in (("shape", list(there.shape), due.shape), ("dtype", there.dtype, due.dtype))
        if is_so != is_due
    ]
    return FieldProblem(field=there.name, message="; ".join(findings)) if findings else None


def write_applied(base: Path, delta: Path, full: Path) -> None:
    """Writes to `full` the weights `base` as `delta` changes them; raises `WeightsRefused`."""
    try:
        header = read_header(base)
        with full.open("wb") as file:
            file.write(header_bytes(header.entries, header.metadata))
            for _, data in applied(base, delta):
                file.write(data)
    except BadDelta as error:
        raise weights_refused(str(error).removeprefix(f"{error.tensor}: ").removesuffix("."), error.tensor) from error
    except NotSafetensors as error:
        raise weights_refused(f"{error}".replace(str(delta), "the delta").removesuffix(".")) from error
    except FileNotFoundError as error:
        raise weights_refused("newer versions have taken the place of the base; send full weights", "base") from error


def write_checkpoint(checkpoint: Path, full: Path) -> None:
    """Writes the files of a checkpoint as one, whatever tensors they hold; raises `WeightsRefused`."""
    try:
        tensors = file_tensors(checkpoint)
        header = header_of((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        with full.open("wb") as file:
            file.write(header_bytes(header.entries, {"format": "pt"}))
            for tensor in tensors.values():
                file.writelines(tensor.blocks(tensor.dtype))
    except (ValueError, OSError) as error:
        raise weights_refused(str(error).removesuffix(".")) from error


def write_adapter(folder: Path, packed: Path) -> None:
    """Writes a PEFT adapter's folder as one file; raises `WeightsRefused`."""
    try:
        with packed.open("wb") as file:
            file.writelines(adapter_weights(folder).blocks())
    except (ValueError, OSError) as error:
        raise weights_refused(str(error).removesuffix(".")) from error


def fetched_checkpoint(location: str, roots: Sequence[str], into: Path) -> Path:
    """The checkpoint at a path or fsspec URL under one of `roots`, fetched to `into` where it is not on this machine.

    Raises:
        SourceRefused: it lies outside the roots, or nothing is there.
    """
    try:
        place = normalized(location)
        refuse_outside([place], roots, location)
        if is_url(place):
            return fetched(place, into)
        refuse_outside(map(normalized, files_of(Path(place))), roots, location)
        return Path(place)
    except SourceRefused:
        raise
    except Exception as error:
        # Each file system has errors of its own.
        raise source_refused(f"it cannot be read: {type(error).__name__}: {error}", location) from error


def refuse_outside(places: Iterable[str], roots: Sequence[str], location: str) -> None:
    under = [normalized(root).rstrip("/") for root in roots]
    for place in places:
        if not any(place == root or place.startswith(f"{root}/") for root in under):
            allowed = (
                ", ".join(roots) or "none is configured; policy.checkpoint_roots of the service's config names them"
            )
            raise source_refused(f"it lies outside the roots that weights may be read from ({allowed})", location)


def files_of(place: Path) -> list[str]:
    """Of a checkpoint's folder or the one file itself, each of which may be a link; raises `FileNotFoundError`."""
    if not place.exists():
        raise FileNotFoundError(place)
    return [str(file) for file in place.iterdir() if file.suffix in FETCHED] if place.is_dir() else [str(place)]


def fetched(url: str, into: Path) -> Path:
    """Raises what the file system of `url` raises, and `FileNotFoundError`."""
    file_system, path = fsspec.core.url_to_fs(url)
    into.mkdir(parents=True, exist_ok=True)
    if file_system.isfile(path):
        file = into / str(posixpath.basename(path))
        file_system.get_file(path, str(file))
        return file
    there = [name for name in file_system.find(path, maxdepth=1) if posixpath.splitext(name)[1] in FETCHED]
    if not there:
        raise FileNotFoundError(url)
    for name in there:
        file_system.get_file(name, str(into / posixpath.basename(name)))
    return into


def normalized(location: str) -> str:
    """Without `.`, `..`, symbolic links and `file://`, so that what looks to lie under a root does.

    Raises:
        ValueError, RuntimeError: it is no path, or its links lead in a circle.
    """
    if not is_url(location):
        return str(Path(location.removeprefix("file://")).resolve())
    parts = urlsplit(location)
    if ".." in unquote(parts.path).split("/") and ".." not in parts.path.split("/"):
        raise ValueError("dots that lead upward are spelt as they are")
    return f"{parts.scheme}://{parts.netloc}{posixpath.normpath(parts.path or '/')}"


def is_url(location: str) -> bool:
    return "://" in location and not location.startswith("file://")


def source_refused(message: str, location: str) -> SourceRefused:
    return SourceRefused(FieldProblem(field="checkpoint", message=message, value=location))


class Bounded:
    """Writes to `file` up to `most_bytes`: a small stream can unpack to more than the disk holds."""

    def __init__(self, file: BinaryIO, most_bytes: int) -> None:
        self._file = file
        self._left_bytes = self._most_bytes = most_bytes

    def write(self, block: bytes) -> int:
        """Raises `WeightsRefused`."""
        self._left_bytes -= len(block)
        if self._left_bytes < 0:
            raise too_large(self._most_bytes)
        return self._file.write(block)


def unpack_zstd(packed: Path, unpacked: Path, most_bytes: int) -> None:
    """Raises `WeightsRefused`, also where it unpacks to more than `most_bytes`."""
    try:
        with packed.open("rb") as source, unpacked.open("wb") as target:
            zstandard.ZstdDecompressor().copy_stream(source, Bounded(target, most_bytes))  # type: ignore[arg-type]  # it only writes
    except zstandard.ZstdError as error:
        raise weights_refused(f"the bytes are no zstd stream, as Content-Encoding says: {error}") from error


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def readable_header(path: Path) -> Header:
    try:
        return read_header(path)
    except NotSafetensors as error:
        raise weights_refused(str(error).replace(f"{path}", "what arrived").removesuffix(".")) from error


def weights_refused(message: str, field: str = "weights") -> WeightsRefused:
    return WeightsRefused(FieldProblem(field=field, message=message))
