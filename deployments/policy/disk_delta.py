"""The disk deltas of miles and slime: what changed since the version before, byte by byte, and how it is applied.

A delta is laid out as a checkpoint: `model.safetensors.index.json`, whose metadata say `version`, `base_version`,
`delta_encoding`, `compression_format` and `checksum_format`, and files that hold, for each changed tensor under its
name, a zstd frame as U8. The metadata of a file have, by name, the checksum of all bytes that the tensor has
afterwards. A frame holds

- `xor`: as many bytes as the tensor, new XOR old, so that applying it twice undoes it;
- `overwrite`: the number of changed bytes (u4), their places (u4 each, little-endian), and their new values.

Written after `miles/utils/disk_delta.py` and `.../update_weight_from_distributed/delta.py` of radixark/miles (commit
31f1ca961a94cb860cec3b2dea34ec332bfa8f76) and `slime/utils/disk_delta.py` of THUDM/slime. Guarantee: a tensor is
written only if it has the checksum that the delta says, after each delta of a chain.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import blake3
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from deployments.policy.assembly import LARGEST_WINDOW_BYTES
from deployments.policy.failures import WeightsRefused
from rollout_client.weights.file_tensors import INDEX_FILE, FileTensor, file_tensors
from rollout_client.weights.safetensors_file import (
    NotSafetensors,
    SourceTensor,
    header_bytes,
    read_header,
    read_tensor,
    tensor_blocks,
)

Bytes = NDArray[np.uint8]
PLACE_BYTES = 4


CHECKSUMS: Mapping[str, Callable[[memoryview], str]] = {
    "xxh3-128": lambda data: str(xxhash.xxh3_128_hexdigest(data)),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}
"""In hex, by the names that an index has for them."""


class DeltaRefused(WeightsRefused):
    """The delta of one version is damaged, or is one of other weights than its base."""

    version: int
    """The version that the delta makes."""

    @classmethod
    def of_version(cls, version: int, field: str, message: str) -> "DeltaRefused":
        refused = cls.of(field, message, version)
        refused.version = version
        return refused


@dataclass(frozen=True, slots=True)
class DiskDelta:
    """The delta that makes `version`."""

    version: int
    encoding: str
    checksum_of: Callable[[memoryview], str]
    tensors: Mapping[str, SourceTensor]
    """The compressed changes, by the name of the tensor that they change."""
    checksums: Mapping[str, str]
    """Those of the whole tensors afterwards."""

    @classmethod
    def read(cls, version: int, base: int | None, folder: Path) -> "DiskDelta":
        """The delta in `folder`, whose tensors are read later.

        Args:
            base: the version that it is applied to.

        Raises:
            DeltaRefused: it does not say what it must, or is not the delta from `base` to `version`.
            OSError: a file cannot be read.
        """
        try:
            index = json.loads((folder / INDEX_FILE).read_text())
            metadata, named = index["metadata"], set(index["weight_map"])
            lineage = int(metadata["version"]), int(metadata["base_version"])
            encoding, compression = str(metadata["delta_encoding"]), metadata["compression_format"]
            algorithm = str(metadata["checksum_format"])
            tensors = file_tensors(folder) if named else {}
        except (NotSafetensors, ValueError, KeyError, TypeError) as error:
            raise DeltaRefused.of_version(version, "weights", f"the delta cannot be read: {error!r}") from error
        checksums: dict[str, str] = {}
        for tensor in tensors.values():
            if isinstance(tensor, FileTensor):
                checksums |= tensor.header.metadata
        problem = None
        if lineage != (version, base):
            problem = f"its index says that it makes version {lineage[0]} of version {lineage[1]}, and not of {base}"
        elif encoding not in ENCODINGS:
            problem = f"its encoding {encoding!r} is not known; known are {', '.join(ENCODINGS)}"
        elif algorithm not in CHECKSUMS:
            problem = f"its checksum {algorithm!r} is not known; known are {', '.join(CHECKSUMS)}"
        elif compression != "zstd":
            problem = f"its compression {compression!r} is not known; known is zstd"
        elif different := named ^ tensors.keys():
            problem = f"its index and its files do not have the same tensors: {min(different)} is in one of them alone"
        elif unchecked := tensors.keys() - checksums.keys():
            problem = f"it has no checksum of {min(unchecked)}"
        if problem is not None:
            raise DeltaRefused.of_version(version, "weights", problem)
        return cls(version, encoding, CHECKSUMS[algorithm], tensors, checksums)

    def apply(self, name: str, data: Bytes) -> None:
        """Makes the new bytes of a tensor of the old ones, in place.

        Raises:
            DeltaRefused: the changes do not fit the tensor, or make another one than their sender says.
        """
        packed = b"".join(self.tensors[name].blocks("U8"))
        try:
            ENCODINGS[self.encoding](data, packed)
        except (ValueError, zstandard.ZstdError) as error:
            raise DeltaRefused.of_version(self.version, name, f"its changes are damaged: {error}") from error
        if (found := self.checksum_of(data.data)) != self.checksums[name]:
            message = (
                f"the changes make a tensor with the checksum {found}, and not {self.checksums[name]}: they are "
                "damaged, or of other weights than the base"
            )
            raise DeltaRefused.of_version(self.version, name, message)


def unpacked(packed: bytes, most_bytes: int) -> Bytes:
    """Raises `ValueError` if it is more than `most_bytes`, and `ZstdError` if it is not a zstd stream."""
    reader = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW_BYTES).stream_reader(packed)
    data = reader.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"they are more than {most_bytes} bytes")
    return np.frombuffer(data, np.uint8)


def _apply_xor(data: Bytes, packed: bytes) -> None:
    changes = unpacked(packed, data.size)
    if changes.size != data.size:
        raise ValueError(f"they are {changes.size} bytes, and the tensor has {data.size}")
    np.bitwise_xor(data, changes, out=data)


def _apply_overwrite(data: Bytes, packed: bytes) -> None:
    changes = unpacked(packed, PLACE_BYTES + data.size * (PLACE_BYTES + 1))
    count = int.from_bytes(changes[:PLACE_BYTES].tobytes(), "little")
    values_at = PLACE_BYTES * (1 + count)
    if changes.size != values_at + count:
        raise ValueError(f"they are {changes.size} bytes, which is not the size of {count} changes")
    places = np.frombuffer(changes[PLACE_BYTES:values_at].tobytes(), "<u4")
    if count and int(places.max()) >= data.size:
        raise ValueError(f"place {places.max()} lies behind the tensor's {data.size} bytes")
    data[places] = changes[values_at:]


ENCODINGS: Mapping[str, Callable[[Bytes, bytes], None]] = {"xor": _apply_xor, "overwrite": _apply_overwrite}


def write_patched(base: Path, deltas: Sequence[DiskDelta], full: Path) -> None:
    """Writes what the deltas, one after the other, make of the weights in `base`. Memory holds one tensor.

    Raises:
        DeltaRefused: one changes a tensor that there is not, or makes other bytes than its sender says.
    """
    header = read_header(base)
    for delta in deltas:
        if unknown := delta.tensors.keys() - header.by_name.keys():
            raise DeltaRefused.of_version(delta.version, min(unknown), "the tensor is not known to the model")
    with full.open("wb") as file:
        file.write(header_bytes(header.entries, header.metadata))
        for entry in header.entries:
            changing = [delta for delta in deltas if entry.name in delta.tensors]
            if not changing:
                file.writelines(tensor_blocks(base, header, entry))
                continue
            data = np.frombuffer(bytearray(read_tensor(base, header, entry)), np.uint8)
            for delta in changing:
                delta.apply(entry.name, data)
            file.write(data.data)
