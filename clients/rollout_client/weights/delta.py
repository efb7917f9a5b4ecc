"""Deltas: the values that changed between two versions of the same tensors, bit for bit. Needs numpy.

For each changed tensor `name` a delta holds two tensors of one length: `{name}.gaps` (I32) and `{name}.values`, the new
values. A gap is the distance of a changed value from the changed one before it in the flattened tensor; the first gap
is counted from index 0. Values are compared and stored as unsigned integers of the same size, so NaN payloads, -0.0 and
dtypes that numpy does not have are preserved.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from rollout_client.weights.safetensors_file import (
    DTYPE_BYTES,
    Data,
    Header,
    TensorEntry,
    Weights,
    header_of,
    read_tensor,
)

Bits = NDArray[np.unsignedinteger]
"""A flattened tensor: each value as an unsigned integer of the same size."""
Gaps = NDArray[np.int32]
Places = NDArray[np.int64]

GAPS = ".gaps"
VALUES = ".values"
MAX_GAP = int(np.iinfo(np.int32).max)


class BadDelta(ValueError):
    """A delta does not fit the weights that it changes; `tensor` is the name of the first one that does not fit."""

    def __init__(self, tensor: str, finding: str) -> None:
        super().__init__(f"{tensor}: {finding}")
        self.tensor = tensor


@dataclass(frozen=True, slots=True)
class TensorChanges:
    """Changes of one tensor; both arrays are 1-D and of one length. Those of a file are so by `delta_entries`."""

    gaps: Gaps
    values: Bits

    @property
    def size_bytes(self) -> int:
        return self.gaps.nbytes + self.values.nbytes


DeltaEntry = tuple[TensorEntry, TensorEntry]
"""The two tensors of a delta that hold the changes of one tensor: gaps and values."""


def as_bits(dtype: str, data: Data) -> Bits:
    """`data` of a tensor of `dtype` as unsigned integers, without a copy; writable where `data` is."""
    return np.frombuffer(data, dtype=f"<u{DTYPE_BYTES[dtype]}")


def encode_changes(base: Bits, new: Bits, max_gap: int = MAX_GAP) -> TensorChanges:
    """The changes that make `new` from `base`, which has the same length and dtype."""
    indices = np.flatnonzero(base != new)
    gaps = np.diff(indices, prepend=0)
    if gaps.size and gaps.max() > max_gap:
        indices = _split_long_gaps(indices, max_gap)
        gaps = np.diff(indices, prepend=0)
    return TensorChanges(gaps.astype(np.int32), new[indices])


def _split_long_gaps(indices: NDArray[np.int64], max_gap: int) -> NDArray[np.int64]:
    """`indices` and further ones between them, such that no gap is above `max_gap`.

    A value that did not change may stand in a delta: it replaces itself.
    """
    starts = np.concatenate([np.zeros(1, np.int64), indices[:-1]])
    between = [
        np.arange(start + max_gap, index, max_gap)
        for start, index in zip(starts, indices, strict=True)
        if index - start > max_gap
    ]
    return np.sort(np.concatenate([indices, *between]))


def apply_changes(name: str, base: Bits, changes: TensorChanges) -> None:
    """Changes `base`, which must be writable, in place: the inverse of `encode_changes`.

    Raises:
        BadDelta: the changes do not fit tensor `name`; `base` is unchanged.
    """
    base[changed_places(name, base.size, changes)] = changes.values


def changed_places(name: str, count: int, changes: TensorChanges) -> Places:
    """The index of each changed value in the flattened tensor `name`, which has `count` values.

    Raises:
        BadDelta: the changes do not fit the tensor.
    """
    gaps = changes.gaps
    if not gaps.size:
        return np.empty(0, np.int64)
    if gaps[0] < 0 or (gaps[1:] < 1).any():
        raise BadDelta(name, "a gap is too small: the first must be at least 0, the others at least 1.")
    places = np.cumsum(gaps, dtype=np.int64)
    if places[-1] >= count:
        raise BadDelta(name, f"place {places[-1]} is changed, and the tensor has only {count} values.")
    return places


def delta_weights(changes: Mapping[str, TensorChanges], base: Header) -> Weights:
    """`changes` of tensors of `base` as the content of a delta file: all gaps, then all values, to compress better."""
    dtypes = {entry.name: entry.dtype for entry in base.entries}
    gaps = {name + GAPS: ("I32", changed.gaps) for name, changed in changes.items()}
    values = {name + VALUES: (dtypes[name], changed.values) for name, changed in changes.items()}
    parts: dict[str, tuple[str, Gaps | Bits]] = {**gaps, **values}
    header = header_of((name, dtype, array.shape) for name, (dtype, array) in parts.items())
    return Weights(header, lambda entry: iter([parts[entry.name][1].view(np.uint8).data]))


def delta_entries(delta: Header, base: Mapping[str, TensorEntry]) -> dict[str, DeltaEntry]:
    """The tensors of `base` that a delta with this header changes, by name. Reads the header only, no data.

    Raises:
        BadDelta: a name, dtype or shape in the header does not fit `base`.
    """
    by_name = delta.by_name
    changed: dict[str, DeltaEntry] = {}
    for entry in delta.entries:
        name, dot, suffix = entry.name.rpartition(".")
        if dot + suffix not in (GAPS, VALUES):
            raise BadDelta(entry.name, f"a delta holds only names that end in {GAPS} or {VALUES}.")
        if name not in base:
            raise BadDelta(name, "the base has no such tensor.")
        gaps, values = by_name.get(name + GAPS), by_name.get(name + VALUES)
        if gaps is None or values is None:
            raise BadDelta(name, f"{name}{VALUES if values is None else GAPS} is missing.")
        if gaps.dtype != "I32":
            raise BadDelta(name, f"gaps are {gaps.dtype}; they must be I32.")
        if values.dtype != base[name].dtype:
            raise BadDelta(name, f"values are {values.dtype} where the base has {base[name].dtype}.")
        if len(gaps.shape) != 1 or gaps.shape != values.shape:
            raise BadDelta(name, f"gaps and values have shapes {gaps.shape} and {values.shape}: both must be one [n].")
        changed[name] = (gaps, values)
    return changed


def read_changes(path: str | PathLike[str], header: Header, entry: DeltaEntry) -> TensorChanges:
    """The changes of one tensor, from the delta file at `path`; raises what `tensor_blocks` raises."""
    gaps, values = (read_tensor(path, header, part) for part in entry)
    return TensorChanges(np.frombuffer(gaps, dtype="<i4").astype(np.int32, copy=False), as_bits(entry[1].dtype, values))
