"""`FileTensor`: tensors of safetensors files, and checkpoints and adapters as Hugging Face lays them out in folders."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout_client.optional_dependencies import needed_for
from rollout_client.weights.safetensors_file import (
    Data,
    Header,
    NotSafetensors,
    TensorEntry,
    header_of,
    read_header,
    read_tensor,
    tensor_blocks,
)
from rollout_client.weights.tensor import SourceTensor, Weights

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
INDEX_FILE = "model.safetensors.index.json"
MODEL_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class FileTensor(SourceTensor):
    """A tensor of a safetensors file."""

    path: Path
    header: Header
    entry: TensorEntry

    @property
    def dtype(self) -> str:
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def is_sharded(self) -> bool:
        return False

    def blocks(self, dtype: str) -> Iterator[Data]:
        if dtype == self.dtype:
            yield from tensor_blocks(self.path, self.header, self.entry)
            return
        with needed_for(f"Casting {self.path} from {self.dtype} to {dtype}", "torch"):
            from rollout_client.weights.torch_tensor import cast
        yield cast(read_tensor(self.path, self.header, self.entry), self.dtype, dtype)

    def is_tied_to(self, other: SourceTensor) -> bool:
        if not isinstance(other, FileTensor) or other.dtype != self.dtype:
            return False
        return all(a == b for a, b in zip(self.blocks(self.dtype), other.blocks(self.dtype), strict=True))


def file_tensors(path: Path) -> dict[str, SourceTensor]:
    """The tensors of a file, or of a folder with a checkpoint; raises `NotSafetensors`."""
    tensors: dict[str, SourceTensor] = {}
    for file in checkpoint_files(path) if path.is_dir() else [path]:
        header = read_header(file)
        for entry in header.entries:
            if entry.name in tensors:
                raise NotSafetensors(
                    f"{file} holds {entry.name}, and so does another file of {path}: keep one of them."
                )
            tensors[entry.name] = FileTensor(file, header, entry)
    return tensors


def checkpoint_files(folder: Path) -> list[Path]:
    """The files of a checkpoint: those of its index; without an index `model.safetensors`, or else all there are."""
    if (folder / INDEX_FILE).exists():
        try:
            names = set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values())
            if outside := [name for name in names if Path(name).name != name]:
                raise ValueError(f"{outside[0]} does not lie in the folder")
            return [folder / name for name in sorted(names)]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise NotSafetensors(f"{folder / INDEX_FILE} has no weight_map of names to files: {error!r}") from error
    files = [folder / MODEL_FILE] if (folder / MODEL_FILE).exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise NotSafetensors(f"{folder} holds no .safetensors file.")
    return files


def file_weights(path: Path, metadata: Mapping[str, str] | None = None) -> Weights:
    """One file unchanged, except that `metadata` are added to its own; raises `NotSafetensors`."""
    there = read_header(path)
    header = header_of(
        ((entry.name, entry.dtype, entry.shape) for entry in there.entries), {**there.metadata, **(metadata or {})}
    )
    return Weights(header, lambda entry: tensor_blocks(path, there, there.by_name[entry.name]))


def adapter_weights(folder: Path) -> Weights:
    """A LoRA adapter that PEFT saved in `folder`, with its config in the metadata; raises `NotSafetensors`."""
    for name in (ADAPTER_FILE, ADAPTER_CONFIG):
        if not (folder / name).is_file():
            raise NotSafetensors(f"{folder} holds no {name}: save the adapter with save_pretrained of PEFT.")
    text = (folder / ADAPTER_CONFIG).read_text()
    try:
        json.loads(text)
    except ValueError as error:
        raise NotSafetensors(f"{folder / ADAPTER_CONFIG} is no JSON: {error}") from error
    return file_weights(folder / ADAPTER_FILE, {"adapter_config": text})
