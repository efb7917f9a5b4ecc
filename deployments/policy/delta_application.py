"""Full weights, made of a file with older ones and of a delta: on each node and in the policy store.

Guarantees: what is written has the base's header and the base's order of tensors, so it has the base's size, and every
node writes the same bytes; a delta that does not fit raises before anything of the tensor that it changes is written.
The base is read once, and the result is written once and hashed once, by several threads, a tensor each; memory holds
their tensors.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rollout_client.weights.checksum import Checksum
from rollout_client.weights.delta import DeltaEntry, apply_changes, as_bits, delta_entries, read_changes
from rollout_client.weights.safetensors_file import Header, NotSafetensors, TensorEntry, read_header

MOST_THREADS = 4
"""An engine computes on the same cores meanwhile."""


@dataclass(frozen=True, slots=True)
class _Delta:
    """The file of a delta, and where in it the changes of each tensor are."""

    path: Path
    header: Header
    changed: dict[str, DeltaEntry]

    @classmethod
    def read(cls, path: Path, base: Header) -> Self:
        header = read_header(path)
        return cls(path, header, delta_entries(header, base.by_name))

    def apply_to(self, entry: TensorEntry, data: NDArray[np.uint8]) -> None:
        """Changes the data of one tensor in place."""
        if entry.name in self.changed:
            changes = read_changes(self.path, self.header, self.changed[entry.name])
            apply_changes(entry.name, as_bits(entry.dtype, data.data), changes)


def write_applied(base: Path, delta: Path, full: Path) -> str:
    """Writes the weights that `delta` makes of `base`, and returns their `Checksum`.

    Raises:
        BadDelta: the delta does not fit the base.
        NotSafetensors: one of the files is not a safetensors file.
        OSError: a file cannot be read, or `full` cannot be written.
    """
    header = read_header(base)
    changes = _Delta.read(delta, header)
    checksum = Checksum()

    def make(entry: TensorEntry) -> None:
        begin = header.data_begin + entry.begin
        data = _read_at(source.fileno(), begin, entry.size_bytes)
        changes.apply_to(entry, data)
        checksum.add(entry.name, entry.dtype, entry.shape, [data.data])
        _write_at(target.fileno(), begin, data)

    threads = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MOST_THREADS))
    with base.open("rb") as source, full.open("wb") as target, threads:
        _write_at(target.fileno(), 0, _read_at(source.fileno(), 0, header.data_begin))
        for _ in threads.map(make, header.entries):
            pass
    return checksum.hexdigest()


def _read_at(descriptor: int, offset: int, count: int) -> NDArray[np.uint8]:
    """Raises `NotSafetensors` if the file ends before that, though its header said otherwise."""
    data = np.empty(count, np.uint8)
    done = 0
    while done < count:
        read = os.preadv(descriptor, [data[done:].data], offset + done)
        if not read:
            raise NotSafetensors("The base ends within its tensors: it was changed while it was read.")
        done += read
    return data


def _write_at(descriptor: int, offset: int, data: NDArray[np.uint8]) -> None:
    done = 0
    while done < data.size:
        done += os.pwrite(descriptor, data[done:].data, offset + done)
