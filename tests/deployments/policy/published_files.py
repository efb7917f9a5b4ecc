"""Versions in a folder as trainers publish them: checkpoints, and disk deltas as miles writes them."""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import safetensors.numpy
import torch
import xxhash
import zstandard
from safetensors.torch import load

CHECKSUMS: dict[str, Callable[[bytes], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}
INDEX = "model.safetensors.index.json"


def tensor_bytes(weights: bytes) -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    return {name: tensor.reshape(-1).view(torch.uint8).numpy() for name, tensor in load(weights).items()}


def publish_whole(folder: Path, version: int, weights: bytes) -> Path:
    """A checkpoint with an index, as `save_pretrained` writes sharded ones."""
    place = folder / f"weight_v{version:06d}"
    place.mkdir(parents=True)
    (place / "model-00001-of-00001.safetensors").write_bytes(weights)
    names = dict.fromkeys(load(weights), "model-00001-of-00001.safetensors")
    (place / INDEX).write_text(json.dumps({"metadata": {"total_size": len(weights)}, "weight_map": names}))
    return place


def publish_delta(
    folder: Path,
    version: int,
    old: bytes,
    new: bytes,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    said: Mapping[str, str] | None = None,
) -> Path:
    """What changes from `old`, the version before, to `new`; `said` takes the place of metadata in the index."""
    place = folder / f"weight_v{version:06d}"
    place.mkdir(parents=True, exist_ok=True)
    before, after = tensor_bytes(old), tensor_bytes(new)
    changed = {name: data for name, data in after.items() if (data != before[name]).any()}
    packed = {name: np.frombuffer(pack(encoding, before[name], data), np.uint8) for name, data in changed.items()}
    checksums = {name: CHECKSUMS[checksum](data.tobytes()) for name, data in changed.items()}
    file = "model-00000-of-00001.safetensors"
    if packed:
        (place / file).write_bytes(safetensors.numpy.save(packed, checksums))
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    (place / INDEX).write_text(
        json.dumps({"metadata": metadata | dict(said or {}), "weight_map": dict.fromkeys(packed, file)})
    )
    return place


def pack(encoding: str, old: Any, new: Any) -> bytes:
    if encoding == "xor":
        changes = (old ^ new).tobytes()
    else:
        places = np.flatnonzero(old != new).astype("<u4")
        changes = len(places).to_bytes(4, "little") + places.tobytes() + new[old != new].tobytes()
    return zstandard.ZstdCompressor(level=1).compress(changes)
