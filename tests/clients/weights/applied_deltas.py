"""Files with the deltas of a client applied to them, as the service does it."""

from collections.abc import Iterator
from os import PathLike

from rollout_client.weights.delta import apply_changes, as_bits, delta_entries, read_changes
from rollout_client.weights.safetensors_file import Data, TensorEntry, read_header, read_tensor


def apply_delta(base: str | PathLike[str], delta: str | PathLike[str]) -> Iterator[tuple[TensorEntry, Data]]:
    """The tensors of the file `base` after the changes of the file `delta`, in the order of `base`."""
    base_header, delta_header = read_header(base), read_header(delta)
    changed = delta_entries(delta_header, base_header.by_name)
    for entry in base_header.entries:
        data = read_tensor(base, base_header, entry)
        if entry.name not in changed:
            yield entry, data
            continue
        writable = bytearray(data)
        changes = read_changes(delta, delta_header, changed[entry.name])
        apply_changes(entry.name, as_bits(entry.dtype, writable), changes)
        yield entry, writable
