"""Files of deltas, as a client makes them."""

from pathlib import Path

from rollout_client.weights.delta import as_bits, delta_weights, encode_changes
from rollout_client.weights.safetensors_file import read_header, read_tensor


def delta_of(base: Path, new: Path, delta: Path) -> Path:
    """Writes what changed from `base` to `new`."""
    base_header, new_header = read_header(base), read_header(new)
    changes = {
        entry.name: encode_changes(
            as_bits(entry.dtype, read_tensor(base, base_header, entry)),
            as_bits(entry.dtype, read_tensor(new, new_header, new_header.by_name[entry.name])),
        )
        for entry in base_header.entries
    }
    delta.write_bytes(b"".join(bytes(block) for block in delta_weights(changes, base_header).blocks()))
    return delta
