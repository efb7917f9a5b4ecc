"""Weights as what changed since an earlier version, bit for bit; needs numpy.

Of each tensor `name` that changed, a delta holds `{name}.gaps` (I32: how far the place of each changed value in the
flattened tensor lies beyond that of the one before it, the first counted from 0) and `{name}.values`. Values are
compared and carried as bits, so NaN, -0.0 and dtypes that numpy does not know come through as they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from rollout_client.weights.safetensors_file import (
    DTYPE_BYTES,
    Data,
    Header,
    TensorEntry,
    header_of,
    read_header,
    read_tensor,
)
from rollout_client.weights.sources import Weights

Bits = NDArray[np.unsignedinteger]
"""A flat tensor: its values as unsigned integers of the same size."""
Gaps = NDArray[np.int32]

GAPS = ".gaps"
VALUES = ".values"
LARGEST_GAP = 2**31 - 1


class BadDelta(ValueError):
    """A delta does not fit the weights that it is to change; `tensor` is the name of the first that does not."""

    def __init__(self, tensor: str, finding: str) -> None:
        super().__init__(f"{tensor}: {finding}")
        self.tensor = tensor


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed in one tensor; both arrays are flat and of one length."""

    gaps: Gaps
    values: Bits

    @property
    def size_bytes(self) -> int:
        return self.gaps.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """Where the changes of one tensor lie in a delta."""

    gaps: TensorEntry
    values: TensorEntry


def bits(dtype: str, data: Data) -> Bits:
    """`data` of a tensor of `dtype` as unsigned integers, without a copy; read-only where `data` are."""
    return np.frombuffer(data, dtype=f"<u{DTYPE_BYTES[dtype]}")


def encode(base: Bits, new: Bits, largest_gap: int = LARGEST_GAP) -> Changes:
    """What makes `new` of `base`, which has the same length and dtype."""
    places = np.flatnonzero(base != new)
    gaps = np.diff(places, prepend=0)
    if gaps.size and gaps.max() > largest_gap:
        # A place on the way keeps its value, so that each gap is one that 32 bits can hold.
        places = with_stops(places, largest_gap)
        gaps = np.diff(places, prepend=0)
    return Changes(gaps.astype(np.int32), new[places])


def with_stops(places: NDArray[np.int64], largest_gap: int) -> NDArray[np.int64]:
    """`places` with more between them, so that neighbours are at most `largest_gap` apart."""
    starts = np.concatenate([np.zeros(1, np.int64), places[:-1]])
    stops = [
        np.arange(start + largest_gap, place, largest_gap)
        for start, place in zip(starts, places, strict=True)
        if place - start > largest_gap
    ]
    return np.sort(np.concatenate([places, *stops]))


def decode(name: str, base: Bits, changes: Changes) -> None:
    """Makes of `base` (writeable, in place) what `encode` was given as `new`.

    Raises:
        BadDelta: the changes do not fit tensor `name`; `base` is as it was.
    """
    gaps, values = changes.gaps, changes.values
    if gaps.ndim != 1 or values.ndim != 1:
        raise BadDelta(name, f"gaps and values have {gaps.ndim} and {values.ndim} dimensions; each must have one.")
    if gaps.dtype != np.int32 or values.dtype != base.dtype:
        raise BadDelta(name, f"gaps are {gaps.dtype} and values {values.dtype}; int32 and {base.dtype} must be.")
    if gaps.size != values.size:
        raise BadDelta(name, f"there are {gaps.size} gaps and {values.size} values; there must be as many.")
    if not gaps.size:
        return
    if gaps[0] < 0 or (gaps[1:] < 1).any():
        raise BadDelta(name, "a gap is too small: the first must be at least 0, the others at least 1.")
    places = np.cumsum(gaps, dtype=np.int64)
    if places[-1] >= base.size:
        raise BadDelta(name, f"place {places[-1]} is changed, and the tensor has only {base.size} values.")
    base[places] = values


def packed(changes: Mapping[str, Changes], base: Header) -> Weights:
    """`changes` of tensors of `base` as a safetensors file: all gaps, then all values, which compresses better."""
    dtypes = {entry.name: entry.dtype for entry in base.entries}
    gaps = {name + GAPS: ("I32", changed.gaps) for name, changed in changes.items()}
    values = {name + VALUES: (dtypes[name], changed.values) for name, changed in changes.items()}
    parts: dict[str, tuple[str, Gaps | Bits]] = {**gaps, **values}
    header = header_of((name, dtype, array.shape) for name, (dtype, array) in parts.items())
    return Weights(header, lambda entry: iter([parts[entry.name][1].view(np.uint8).data]))


def changed_tensors(delta: Header, base: Mapping[str, TensorEntry]) -> dict[str, ChangedTensor]:
    """Which tensors of `base` a delta with this header changes, without looking at its data.

    Raises:
        BadDelta: a name, dtype or shape in it does not fit `base`.
    """
    entries = delta.by_name
    changed: dict[str, ChangedTensor] = {}
    for entry in delta.entries:
        name, dot, end = entry.name.rpartition(".")
        if dot + end not in (GAPS, VALUES):
            raise BadDelta(entry.name, f"a delta holds only names that end in {GAPS} or {VALUES}.")
        if name not in base:
            raise BadDelta(name, "the base has no such tensor.")
        gaps, values = entries.get(name + GAPS), entries.get(name + VALUES)
        if gaps is None or values is None:
            raise BadDelta(name, f"{name}{VALUES if values is None else GAPS} is missing.")
        check_entries(name, gaps, values, base[name])
        changed[name] = ChangedTensor(gaps, values)
    return changed


def check_entries(name: str, gaps: TensorEntry, values: TensorEntry, base: TensorEntry) -> None:
    if gaps.dtype != "I32":
        raise BadDelta(name, f"gaps are {gaps.dtype}; they must be I32.")
    if values.dtype != base.dtype:
        raise BadDelta(name, f"values are {values.dtype} where the base has {base.dtype}.")
    if len(gaps.shape) != 1 or gaps.shape != values.shape:
        raise BadDelta(name, f"gaps and values have shapes {gaps.shape} and {values.shape}: both must be one [n].")


def read_changes(path: str | PathLike[str], header: Header, tensor: ChangedTensor) -> Changes:
    """The changes of one tensor, from the delta at `path`; raises what `tensor_blocks` raises."""
    gaps = np.frombuffer(read_tensor(path, header, tensor.gaps), dtype="<i4").astype(np.int32, copy=False)
    return Changes(gaps, bits(tensor.values.dtype, read_tensor(path, header, tensor.values)))


def applied(base: str | PathLike[str], delta: str | PathLike[str]) -> Iterator[tuple[TensorEntry, Data]]:
    """The tensors of the file `base` with the changes of the file `delta`, one after another in the base's order.

    Raises:
        NotSafetensors: one of the files is none.
        BadDelta: the delta does not fit the base, before or at the tensor where that shows.
    """
    base_header, delta_header = read_header(base), read_header(delta)
    changed = changed_tensors(delta_header, base_header.by_name)
    for entry in base_header.entries:
        data = read_tensor(base, base_header, entry)
        if entry.name not in changed:
            yield entry, data
            continue
        writeable = bytearray(data)
        decode(entry.name, bits(entry.dtype, writeable), read_changes(delta, delta_header, changed[entry.name]))
        yield entry, writeable
