"""Safetensors files: headers are checked before use, and tensors are read and written block by block.

A file is 8 bytes (length of the header, little-endian), the header (JSON, padded with spaces), then the data of the
tensors, little-endian, one after another. `Weights` is the content of a file that is made while it is read,
`SourceTensor` one tensor that goes into it. Needs neither torch nor numpy, and holds one block in memory.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from rollout_client.errors import shortened

Data = bytes | bytearray | memoryview
"""Bytes of a tensor, or a part of them. A `memoryview` has items of one byte."""

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
"""Size of one value by dtype, as a header names it."""

LENGTH_BYTES = 8
ALIGNMENT = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
BLOCK_BYTES = 8 << 20
MAX_DIMENSIONS = 64
MAX_SIZE = 2**63 - 1
MAX_SHOWN = 200
"""An error message quotes at most this many characters of a header."""
PICKLE_PREFIXES = (b"\x80", b"PK\x03\x04")


class NotSafetensors(ValueError):
    """A file is not a safetensors file, or is incomplete; the message says where."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header; its data are the bytes `[begin, end)` after the header."""

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
    """The tensors of a file in the order of their data, which lie without gaps, and its metadata."""

    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    data_begin: int = 0
    """Offset of the data in the file, in bytes."""

    @property
    def by_name(self) -> dict[str, TensorEntry]:
        return {entry.name: entry for entry in self.entries}

    @property
    def file_bytes(self) -> int:
        return self.data_begin + (self.entries[-1].end if self.entries else 0)


def header_of(tensors: Iterable[tuple[str, str, Iterable[int]]], metadata: Mapping[str, str] | None = None) -> Header:
    """The header of a file that holds `tensors` (name, dtype, shape) in this order.

    Raises:
        ValueError: a name occurs twice or is reserved, or a file cannot hold the dtype.
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
    """The bytes of a file that precede the data: length and JSON."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries:
        document[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of the file at `path`, checked: its tensors fill the file exactly, without gaps or overlaps.

    Raises:
        NotSafetensors: the file is incomplete, or not a safetensors file.
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        return read_header_of(file, os.fstat(file.fileno()).st_size, path)


def read_header_of(file: BinaryIO, file_bytes: int, path: str | os.PathLike[str]) -> Header:
    """As `read_header`, of an open file of so many bytes; `path` is what messages call it."""
    start = file.read(LENGTH_BYTES)
    header_length = int.from_bytes(start, "little")
    if start.startswith(PICKLE_PREFIXES) and header_length > file_bytes:
        raise NotSafetensors(f"{path} is a pickle or an archive: save the weights as safetensors.")
    if len(start) < LENGTH_BYTES or header_length > file_bytes - LENGTH_BYTES:
        raise NotSafetensors(f"{path} is not a safetensors file, or was cut off: it ends within its header.")
    if header_length > MAX_HEADER_BYTES:
        raise NotSafetensors(f"{path} has a header of {header_length} bytes; at most {MAX_HEADER_BYTES} may be.")
    text = file.read(header_length)
    try:
        header = parse_header(text)
    except ValueError as error:
        raise NotSafetensors(f"{path}: {shortened(str(error), MAX_SHOWN)}") from error
    if header.file_bytes != file_bytes:
        raise NotSafetensors(f"{path} has {file_bytes} bytes, its header says {header.file_bytes}: it is not whole.")
    return header


def read_header_bytes(path: str | os.PathLike[str], header: Header) -> bytes:
    """The bytes of the file that precede its data, as they are there."""
    with Path(path).open("rb") as file:
        return file.read(header.data_begin)


def parse_header(text: bytes) -> Header:
    """Parses the JSON of a header; raises `NotSafetensors` if it is not the header of a file."""
    if not text.startswith(b"{"):
        raise NotSafetensors("The header does not begin with {.")
    try:
        document = json.loads(text, object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise NotSafetensors(f"The header is not JSON: {error}") from error
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(map(_is_text, metadata.values())):
        raise NotSafetensors("The header's __metadata__ holds a value that is not text.")
    if not all(map(_is_text, document)):
        raise NotSafetensors("The header holds a name that is not text.")
    found = [_parse_entry(name, tensor) for name, tensor in document.items()]
    entries = sorted(found, key=lambda entry: (entry.begin, entry.end))
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise NotSafetensors(f"The data of {entry.name} begin at {entry.begin} where {end} is due.")
        end = entry.end
    return Header(tuple(entries), metadata, LENGTH_BYTES + len(text))


def _parse_entry(name: str, document: object) -> TensorEntry:
    if not isinstance(document, dict) or set(document) != {"dtype", "shape", "data_offsets"}:
        raise NotSafetensors(f"{name} has not just dtype, shape and data_offsets.")
    dtype, shape, offsets = document["dtype"], document["shape"], document["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise NotSafetensors(f"{name} has the dtype {dtype!r}, which is not known.")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise NotSafetensors(f"{shortened(name, MAX_SHOWN)} has a shape or data_offsets that are not sizes.")
    begin, end = offsets
    if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise NotSafetensors(f"{name} has {end - begin} bytes, which is not its shape {shape} of {dtype}.")
    return TensorEntry(name, dtype, tuple(shape), begin, end)


def _is_sizes(value: object) -> bool:
    """Whether `value` is a list of sizes. Their count and magnitude are bounded, so that their product is cheap."""
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size <= MAX_SIZE for size in value)


def _is_text(value: object) -> bool:
    """Whether `value` is a text that UTF-8 can encode: JSON can spell lone surrogates, which it cannot."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name occurs twice")
    return names


def tensor_blocks(
    path: str | os.PathLike[str], header: Header, entry: TensorEntry, block_bytes: int = BLOCK_BYTES
) -> Iterator[bytes]:
    """The data of one tensor in blocks of `block_bytes`; the last one may be shorter.

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


class SourceTensor(Protocol):
    """One tensor of a source; its data are read only when they are sent.

    `FileTensor` reads a safetensors file, `TorchTensor` a tensor in memory.
    """

    @property
    def dtype(self) -> str:
        """Dtype as safetensors names it: `BF16`, `F32`, ..."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def is_sharded(self) -> bool:
        """Whether reading it is a collective operation of several processes."""
        return False

    def blocks(self, dtype: str) -> Iterator[Data]:
        """Its data, cast to `dtype`, little-endian, in blocks of any size."""

    def is_tied_to(self, other: "SourceTensor") -> bool:  # noqa: ARG002 - for those that can compare
        """Whether `other`, of the same shape, is the same tensor under another name."""
        return False


@dataclass(frozen=True, slots=True)
class Weights:
    """The content of a safetensors file, made while it is read: a header, and a function that reads each tensor."""

    header: Header
    read: Callable[[TensorEntry], Iterator[Data]]
    is_repeatable: bool = True
    """Whether the content can be read again. Sharded tensors cannot: every process would have to take part again."""
    checksum: str | None = None
    """The `Checksum` of its tensors, if known: sending then does not compute it again."""

    def blocks(self) -> Iterator[Data]:
        """The bytes of the file in order, in blocks of any size."""
        yield header_bytes(self.header.entries, self.header.metadata)
        for entry in self.header.entries:
            yield from self.read(entry)
