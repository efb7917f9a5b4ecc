"""From what arrived to one safetensors file with all tensors, ready to be validated.

What arrives is a file with all tensors or some, a zstd stream, or a folder with a checkpoint or an adapter. No pickle
is ever read. Memory holds one block of one tensor at a time. `delta_application.py` makes full weights of a
delta.
"""

from collections.abc import Mapping
from pathlib import Path

import zstandard

from deployments.policy.failures import WeightsRefused
from deployments.policy.weight_checks import too_large
from rollout_client.weights.file_tensors import adapter_weights, file_tensors
from rollout_client.weights.safetensors_file import header_bytes, header_of, read_header, tensor_blocks

BASE_REMOVED = "newer versions have taken the place of the base; send full weights"
BLOCK_BYTES = 2**20
LARGEST_WINDOW_BYTES = 2**27
"""Memory that a zstd stream may ask for; what `zstd` itself allows by default, at every level up to 19."""


def write_completed(base: Path, partial: Path, full: Path) -> None:
    """Writes the tensors of `partial`, and under all other names those of `base`.

    Args:
        partial: has no names, dtypes and shapes but those of `base`.

    Raises:
        WeightsRefused: the base was removed meanwhile.
    """
    try:
        base_header, partial_header = read_header(base), read_header(partial)
        replaced = partial_header.by_name
        with full.open("wb") as file:
            file.write(header_bytes(base_header.entries, base_header.metadata))
            for entry in base_header.entries:
                if (new := replaced.get(entry.name)) is not None:
                    file.writelines(tensor_blocks(partial, partial_header, new))
                else:
                    file.writelines(tensor_blocks(base, base_header, entry))
    except FileNotFoundError as error:
        raise WeightsRefused.of("base", BASE_REMOVED) from error


def write_checkpoint(checkpoint: Path, full: Path) -> None:
    """Writes the tensors of a checkpoint, a file or a folder of them, as one file.

    Raises:
        WeightsRefused: the checkpoint cannot be read.
    """
    try:
        tensors = file_tensors(checkpoint)
        header = header_of((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        with full.open("wb") as file:
            file.write(header_bytes(header.entries, {"format": "pt"}))
            for tensor in tensors.values():
                file.writelines(tensor.blocks(tensor.dtype))
    except (ValueError, OSError) as error:
        raise WeightsRefused.of("weights", str(error).removesuffix(".")) from error


def write_renamed(pushed: Path, names: Mapping[str, str], renamed: Path, metadata: Mapping[str, str]) -> None:
    """Writes the tensors of `pushed` under other names, with these metadata.

    Args:
        names: the new name of each tensor.
    """
    header = read_header(pushed)
    new = header_of(((names[entry.name], entry.dtype, entry.shape) for entry in header.entries), metadata)
    with renamed.open("wb") as file:
        file.write(header_bytes(new.entries, metadata))
        for entry in header.entries:
            file.writelines(tensor_blocks(pushed, header, entry))


def write_adapter(folder: Path, packed: Path) -> None:
    """Writes the tensors and the configuration in a PEFT adapter's folder as one file.

    Raises:
        WeightsRefused: the folder holds no adapter.
    """
    try:
        with packed.open("wb") as file:
            file.writelines(adapter_weights(folder).blocks())
    except (ValueError, OSError) as error:
        raise WeightsRefused.of("weights", str(error).removesuffix(".")) from error


class NotZstd(WeightsRefused):
    """The bytes are not a zstd stream: they never were, or were damaged."""


def unpack_zstd(packed: Path, unpacked: Path, most_bytes: int) -> None:
    """Decompresses a file.

    Raises:
        NotZstd: it is not a zstd stream.
        WeightsRefused: it decompresses to more than `most_bytes`; no more is written then.
    """
    try:
        with packed.open("rb") as source, unpacked.open("wb") as target:
            decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW_BYTES)
            reader = decompressor.stream_reader(source, read_across_frames=True)
            while block := reader.read(BLOCK_BYTES):
                if target.tell() + len(block) > most_bytes:
                    raise too_large(most_bytes)
                target.write(block)
    except zstandard.ZstdError as error:
        message = f"the bytes are not a zstd stream, as Content-Encoding says: {error}"
        raise NotZstd.of("weights", message) from error
