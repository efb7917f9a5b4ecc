"""Full weights, made of a file with older ones and of the deltas that follow it: on each node and in the policy store.

Guarantees: what is written has the base's header and the base's order of tensors, so it has the base's size, and every
node writes the same bytes; a delta that does not fit raises before anything of the tensor that it changes is written.
The base is read once, and the result is written once and hashed once: a thread hashes each tensor while the next is
made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rollout_client.weights.checksum import ThreadedChecksum
from rollout_client.weights.delta import DeltaEntry, apply_changes, as_bits, delta_entries, read_changes
from rollout_client.weights.safetensors_file import Header, NotSafetensors, TensorEntry, read_header


@dataclass(frozen=True, slots=True)
class Delta:
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


def write_applied(base: Path, deltas: Sequence[Path], full: Path) -> str:
    """Writes the weights that `deltas`, one after the other, make of `base`, and returns their `Checksum`.

    Raises:
        BadDelta: a delta does not fit the base.
        NotSafetensors: one of the files is not a safetensors file.
        OSError: a file cannot be read, or `full` cannot be written.
    """
    header = read_header(base)
    applied = [Delta.read(path, header) for path in deltas]
    checksum = ThreadedChecksum()
    with base.open("rb") as source, full.open("wb") as target, checksum:
        target.write(source.read(header.data_begin))
        for entry in header.entries:
            data = np.empty(entry.size_bytes, np.uint8)
            if source.readinto(data.data) != entry.size_bytes:
                raise NotSafetensors(f"{base} ends within {entry.name}: it was changed while it was read.")
            for delta in applied:
                delta.apply_to(entry, data)
            checksum.add(entry.name, entry.dtype, entry.shape, data.data)
            target.write(data.data)
        return checksum.hexdigest()
