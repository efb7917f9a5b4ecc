"""Tensors of safetensors files: checkpoints as Hugging Face lays them out in folders, LoRA adapters as PEFT saves them.

The adapter of a module that PEFT has wrapped goes through such a folder. PEFT is known by the module's methods.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollout_client.contract.policy import PolicyLayout
from rollout_client.errors import needed_for
from rollout_client.weights.safetensors_file import (
    Data,
    Header,
    NotSafetensors,
    SourceTensor,
    TensorEntry,
    Weights,
    header_of,
    read_header,
    read_tensor,
    tensor_blocks,
)

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

    def blocks(self, dtype: str) -> Iterator[Data]:
        if dtype == self.dtype:
            yield from tensor_blocks(self.path, self.header, self.entry)
            return
        with needed_for(f"Casting {self.path} from {self.dtype} to {dtype}", "torch"):
            from rollout_client.weights.model_tensors import cast
        yield cast(read_tensor(self.path, self.header, self.entry), self.dtype, dtype)

    def is_tied_to(self, other: SourceTensor) -> bool:
        if not isinstance(other, FileTensor) or other.dtype != self.dtype:
            return False
        return all(a == b for a, b in zip(self.blocks(self.dtype), other.blocks(self.dtype), strict=True))


def file_tensors(path: Path) -> dict[str, SourceTensor]:
    """The tensors of a file, or of a folder with a checkpoint; raises `NotSafetensors`."""
    tensors: dict[str, SourceTensor] = {}
    for file in _checkpoint_files(path) if path.is_dir() else [path]:
        header = read_header(file)
        for entry in header.entries:
            if entry.name in tensors:
                raise NotSafetensors(
                    f"{file} holds {entry.name}, and so does another file of {path}: keep one of them."
                )
            tensors[entry.name] = FileTensor(file, header, entry)
    return tensors


def _checkpoint_files(folder: Path) -> list[Path]:
    """Files of a checkpoint: those of its index; without an index `model.safetensors`, or else all of the folder."""
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
        raise NotSafetensors(f"{folder / ADAPTER_CONFIG} is not JSON: {error}") from error
    return file_weights(folder / ADAPTER_FILE, {"adapter_config": text})


UNNAMED = "default"
"""PEFT's name for an adapter without a name, which it saves in the folder itself."""


class RankTooHigh(ValueError):
    """The service's engines do not take adapters of this rank; nothing was sent."""


def rank_problem(adapter_config: str, max_lora_rank: int | None) -> str | None:
    """Reason why engines do not take adapters of this rank, if they do not.

    Args:
        adapter_config: the text of the adapter's `adapter_config.json`.
        max_lora_rank: as in `PolicyLayout`.
    """
    if max_lora_rank is None:
        return None
    if max_lora_rank == 0:
        return "the engines take no adapters: set enable_lora: true under engine in the service's config"
    config = json.loads(adapter_config)
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    rank = max((each for each in ranks if isinstance(each, int)), default=0)
    if rank <= max_lora_rank:
        return None
    return (
        f"its rank is {rank}, and the engines take at most {max_lora_rank}: raise max_lora_rank under engine in the "
        "service's config, or train with a smaller r"
    )


def with_accepted_rank(adapter: Weights, layout: PolicyLayout | None) -> Weights:
    """The same adapter; raises `RankTooHigh` if the engines of `layout` do not take it."""
    problem = None if layout is None else rank_problem(adapter.header.metadata["adapter_config"], layout.max_lora_rank)
    if problem is not None:
        raise RankTooHigh(f"The adapter does not fit the service; nothing was sent: {problem}.")
    return adapter


def module_adapter(module: Any) -> Weights:
    """The active adapter, in host memory: the module may change from now on.

    Raises:
        ValueError: PEFT has not wrapped the module, or several of its adapters are active.
    """
    if not hasattr(module, "peft_config"):
        raise ValueError(f"{type(module).__name__} has no adapter of PEFT, and kind='adapter' sends one.")
    active = [module.active_adapter] if isinstance(module.active_adapter, str) else list(module.active_adapter)
    if len(active) != 1:
        raise ValueError(f"The adapters {', '.join(active)} are active: set_adapter() chooses the one to be sent.")
    [name] = active
    with TemporaryDirectory() as folder:
        module.save_pretrained(folder, selected_adapters=[name])
        saved = adapter_weights(Path(folder) if name == UNNAMED else Path(folder, name))
        tensors = {entry.name: b"".join(saved.read(entry)) for entry in saved.header.entries}
    return Weights(saved.header, lambda entry: iter([tensors[entry.name]]))
