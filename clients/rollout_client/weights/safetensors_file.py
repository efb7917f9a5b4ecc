"""Weights as safetensors files: written tensor by tensor, read after their header was checked, and summed up.

A file is 8 bytes (length of the header, little-endian), the header (JSON, padded with spaces), and the tensors' data,
little-endian, one after another. No torch and no numpy here; what is held in memory is one block, never a model.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Data = bytes | bytearray | memoryview
"""Bytes of a tensor, or some of them; a `memoryview` of single bytes."""

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""Size of one value of each dtype, by its name in a header."""

LENGTH_BYTES = 8
ALIGNMENT = 8
LONGEST_HEADER_BYTES = 100_000_000
"""As the safetensors library has it; a header of a million tensors is longer than any model's."""
BLOCK_BYTES = 8 << 20
MOST_DIMENSIONS = 64
LARGEST_SIZE = 2**63 - 1
LONGEST_SHOWN = 200
"""Characters of what a header says that stand in the text of an error."""
PICKLE_STARTS = (b"\x80", b"PK\x03\x04")


class NotSafetensors(ValueError):
    """A file is no safetensors file, or not a whole one; the text says where."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What a header says of one tensor; its data are bytes `[begin, end)` after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """`entries` in the order of their data, without holes, and texts under `metadata`."""

    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    data_begin: int = 0
    """Where in the file the data begin, in bytes."""

    @property
    def by_name(self) -> dict[str, TensorEntry]:
        return {entry.name: entry for entry in self.entries}

    @property
    def file_bytes(self) -> int:
        return self.data_begin + (self.entries[-1].end if self.entries else 0)


class Checksum:
    """Sha-256 over tensors, the same in whatever order they are added and however they lie in files.

    It is taken over a line for each tensor, sorted by name: `name dtype shape digest`, the shape as JSON without
    spaces, the digest being the sha-256 of its little-endian data.
    """

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def add(self, name: str, dtype: str, shape: Iterable[int], blocks: Iterable[Data]) -> None:
        """`blocks` are the tensor's data in order. A name that is added again takes the place of the earlier one."""
        digest = hashlib.sha256()
        for block in blocks:
            digest.update(block)
        shape_json = json.dumps(list(shape), separators=(",", ":"))
        self._lines[name] = f"{name} {dtype} {shape_json} {digest.hexdigest()}\n"

    def hexdigest(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self._lines):
            digest.update(self._lines[name].encode())
        return digest.hexdigest()


def header_of(tensors: Iterable[tuple[str, str, Iterable[int]]], metadata: Mapping[str, str] | None = None) -> Header:
    """The header of a file that holds `tensors` (name, dtype, shape) in this order.

    Raises:
        ValueError: a name occurs twice or is reserved, or a dtype is none that a file can hold.
    """
    entries: list[TensorEntry] = []
    names: set[str] = set()
    begin = 0
    for name, dtype, shape in tensors:
        if name in names or name == "__metadata__":
            raise ValueError(
                f"A safetensors file cannot hold the name {name!r} {'twice' if name in names else 'at all'}."
            )
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"{name}: a safetensors file cannot hold the dtype {dtype!r}; cast it to another.")
        names.add(name)
        sizes = tuple(shape)
        end = begin + math.prod(sizes) * DTYPE_BYTES[dtype]
        entries.append(TensorEntry(name, dtype, sizes, begin, end))
        begin = end
    metadata = dict(metadata or {})
    return Header(tuple(entries), metadata, len(header_bytes(entries, metadata)))


def header_bytes(entries: Iterable[TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Everything of a file that comes before the data."""
    said: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries:
        said[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of the file at `path`, checked: its tensors fill the file exactly, without holes or overlaps.

    Raises:
        NotSafetensors: they do not, or the file is something else.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        start = file.read(LENGTH_BYTES)
        header_length = int.from_bytes(start, "little")
        if start.startswith(PICKLE_STARTS) and header_length > file_bytes:
            raise NotSafetensors(f"{path} is a pickle or an archive: save the weights as safetensors.")
        if len(start) < LENGTH_BYTES or header_length > file_bytes - LENGTH_BYTES:
            raise NotSafetensors(f"{path} is no safetensors file, or was cut off: it ends within its header.")
        if header_length > LONGEST_HEADER_BYTES:
            raise NotSafetensors(
                f"{path} has a header of {header_length} bytes; at most {LONGEST_HEADER_BYTES} may be."
            )
        text = file.read(header_length)
    try:
        header = parsed_header(text)
    except ValueError as error:
        raise NotSafetensors(f"{path}: {shortened(str(error))}") from error
    if header.file_bytes != file_bytes:
        raise NotSafetensors(f"{path} has {file_bytes} bytes, its header says {header.file_bytes}: it is not whole.")
    return header


def parsed_header(text: bytes) -> Header:
    """Reads the JSON of a header; raises `NotSafetensors` where it is not one."""
    if not text.startswith(b"{"):
        raise NotSafetensors("The header does not begin with {.")
    try:
        said = json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise NotSafetensors(f"The header is no JSON: {error}") from error
    metadata = said.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) and is_text(value) for value in metadata.values()
    ):
        raise NotSafetensors("The header's __metadata__ holds something that is no text.")
    if not all(map(is_text, said)):
        raise NotSafetensors("The header holds a name that is no text.")
    entries = sorted(
        (entry_of(name, tensor) for name, tensor in said.items()), key=lambda entry: (entry.begin, entry.end)
    )
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise NotSafetensors(f"The data of {entry.name} begin at {entry.begin} where {end} is due.")
        end = entry.end
    return Header(tuple(entries), metadata, LENGTH_BYTES + len(text))


def entry_of(name: str, said: object) -> TensorEntry:
    if not isinstance(said, dict) or set(said) != {"dtype", "shape", "data_offsets"}:
        raise NotSafetensors(f"{name} has not just dtype, shape and data_offsets.")
    dtype, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise NotSafetensors(f"{name} has the dtype {dtype!r}, which is not known.")
    if not is_sizes(shape) or not is_sizes(offsets) or len(offsets) != 2:
        raise NotSafetensors(f"{shortened(name)} has a shape or data_offsets that are no sizes.")
    begin, end = offsets
    if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise NotSafetensors(f"{name} has {end - begin} bytes, which is not its shape {shape} of {dtype}.")
    return TensorEntry(name, dtype, tuple(shape), begin, end)


def is_sizes(value: object) -> bool:
    """Few enough and small enough that their product is made in no time."""
    if not isinstance(value, list) or len(value) > MOST_DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size <= LARGEST_SIZE for size in value)


def is_text(name: str) -> bool:
    """JSON can spell halves of characters, which no file and no answer can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    said = dict(pairs)
    if len(said) != len(pairs):
        raise ValueError("a name occurs twice")
    return said


def tensor_blocks(
    path: str | os.PathLike[str], header: Header, entry: TensorEntry, block_bytes: int = BLOCK_BYTES
) -> Iterator[bytes]:
    """The data of one tensor, `block_bytes` at a time.

    Raises:
        NotSafetensors: the file has become shorter since its header was read.
    """
    left = entry.size_bytes
    with Path(path).open("rb") as file:
        file.seek(header.data_begin + entry.begin)
        while left:
            block = file.read(min(block_bytes, left))
            if not block:
                raise NotSafetensors(f"{path} ends within {entry.name}: it was changed while it was read.")
            left -= len(block)
            yield block


def read_tensor(path: str | os.PathLike[str], header: Header, entry: TensorEntry) -> bytes:
    """The data of one tensor; raises what `tensor_blocks` raises."""
    return b"".join(tensor_blocks(path, header, entry))


def file_checksum(path: str | os.PathLike[str]) -> str:
    """`Checksum` of the tensors of one file; raises what `read_header` raises."""
    header = read_header(path)
    checksum = Checksum()
    for entry in header.entries:
        checksum.add(entry.name, entry.dtype, entry.shape, tensor_blocks(path, header, entry))
    return checksum.hexdigest()
