"""Where weights come from (a torch module, a state dict, files), made to fit the model that the service serves.

Nothing is read before it is sent, and then one tensor, or one block of a file, at a time.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, Union

from rollout_client.optional_dependencies import needed_for
from rollout_client.policy_contract import PolicyLayout, TensorLayout, WeightsKind
from rollout_client.weights.safetensors_file import (
    Data,
    Header,
    NotSafetensors,
    TensorEntry,
    header_bytes,
    header_of,
    read_header,
    read_tensor,
    tensor_blocks,
)

if TYPE_CHECKING:
    import torch

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes that are cast into one another; narrower ones need scales, which a cast does not make."""
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
INDEX_FILE = "model.safetensors.index.json"
MODEL_FILE = "model.safetensors"
MOST_SHOWN_NAMES = 5


class WeightsDoNotFit(ValueError):
    """The tensors are not those of the model that the service serves; nothing was sent.

    Args:
        missing: names that the service needs and the source lacks.
        extra: names that the service does not know, and that are no second name of a tensor it does.
        wrong: name to what is wrong with it, of tensors whose shape or dtype is another.
    """

    def __init__(self, missing: list[str], extra: list[str], wrong: dict[str, str]) -> None:
        super().__init__(
            "The weights are not those of the model that the service serves; nothing was sent."
            + finding("Missing", missing)
            + finding("Not known there", extra)
            + finding("Different", [f"{name} {how}" for name, how in wrong.items()])
        )
        self.missing = missing
        self.extra = extra
        self.wrong = wrong


def finding(title: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MOST_SHOWN_NAMES} more" if len(names) > MOST_SHOWN_NAMES else ""
    return f" {title}: {', '.join(names[:MOST_SHOWN_NAMES])}{more}."


class Tensor(Protocol):
    """One tensor of a source, not read yet."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def is_sharded(self) -> bool:
        """Whether reading it is a collective of several processes."""
        ...

    def blocks(self, dtype: str) -> Iterator[Data]:
        """Its data, little-endian, cast to `dtype`."""
        ...

    def is_tied_to(self, other: "Tensor") -> bool:
        """Whether `other`, of the same shape, is the same tensor by another name."""
        ...


@dataclass(frozen=True, slots=True)
class Weights:
    """A safetensors file that need not exist: its header, and how to read the data of each tensor."""

    header: Header
    read: Callable[[TensorEntry], Iterator[Data]]
    can_repeat: bool = True
    """Whether it can be read more than once; tensors that several processes gather together cannot."""

    def blocks(self) -> Iterator[Data]:
        """The bytes of the file, from its start."""
        yield header_bytes(self.header.entries, self.header.metadata)
        for entry in self.header.entries:
            yield from self.read(entry)


TensorsSource: TypeAlias = Union["torch.nn.Module", "Mapping[str, torch.Tensor]", str, os.PathLike[str]]
"""Weights as a trainer has them. A path is a `.safetensors` file or a folder of them."""
WeightsSource: TypeAlias = TensorsSource | Weights


def needs_layout(source: WeightsSource, kind: WeightsKind) -> bool:
    """Whether `source` has yet to be made to fit the model that the service serves."""
    return kind == "full" and not isinstance(source, Weights)


def weights_to_send(source: WeightsSource, kind: WeightsKind, layout: PolicyLayout | None) -> Weights:
    """What a push of `source` sends.

    Raises:
        WeightsDoNotFit: full weights are not those of `layout`.
        NotSafetensors: a file is none.
        ValueError: weights of this kind cannot come from such a source.
    """
    if isinstance(source, Weights):
        return source
    if layout is not None:
        return full_weights(source, layout)
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"{kind} weights come from a path, not from {type(source).__name__}; see PolicyPusher.")
    return adapter_weights(Path(source)) if kind == "adapter" else file_weights(Path(source))


def full_weights(source: TensorsSource, layout: PolicyLayout) -> Weights:
    """`source` with the tensors and dtypes of `layout`, in the order of the source.

    Floating tensors are cast; a tensor that the layout does not name is left out where it is tied to one that it does.

    Raises:
        WeightsDoNotFit: names or shapes are others, or a dtype is one that no cast makes.
        NotSafetensors: a file is none.
    """
    tensors = fitted(tensors_of(source), layout)
    header = header_of(((name, layout.tensors[name].dtype, tensor.shape) for name, tensor in tensors.items()), PT)
    can_repeat = not any(tensor.is_sharded for tensor in tensors.values())
    return Weights(header, lambda entry: tensors[entry.name].blocks(entry.dtype), can_repeat)


PT = {"format": "pt"}
"""Without it transformers refuses a file."""


def tensors_of(source: TensorsSource) -> dict[str, Tensor]:
    if isinstance(source, str | os.PathLike):
        return file_tensors(Path(source))
    with needed_for("Sending torch tensors", "torch"):
        from rollout_client.weights.torch_tensors import torch_tensors
    return torch_tensors(source)


def fitted(tensors: Mapping[str, Tensor], layout: PolicyLayout) -> dict[str, Tensor]:
    """Those of `tensors` that `layout` names; raises `WeightsDoNotFit`."""
    sent = {name: tensor for name, tensor in tensors.items() if name in layout.tensors}
    missing = [name for name in layout.tensors if name not in tensors]
    wrong = {
        name: how for name, tensor in sent.items() if (how := difference(tensor, layout.tensors[name])) is not None
    }
    if not missing and not wrong:
        # Only now: telling whether two tensors are one may have to read them.
        extra = [name for name, tensor in tensors.items() if name not in sent and not is_tied(tensor, sent)]
    else:
        extra = [name for name in tensors if name not in sent]
    if missing or extra or wrong:
        raise WeightsDoNotFit(missing, extra, wrong)
    return sent


def difference(tensor: Tensor, layout: TensorLayout) -> str | None:
    if tensor.shape != tuple(layout.shape):
        return f"has shape {list(tensor.shape)} instead of {layout.shape}"
    if tensor.dtype != layout.dtype and not {tensor.dtype, layout.dtype} <= FLOATS:
        return f"is {tensor.dtype} instead of {layout.dtype}"
    return None


def is_tied(tensor: Tensor, sent: Mapping[str, Tensor]) -> bool:
    return any(tensor.shape == other.shape and tensor.is_tied_to(other) for other in sent.values())


@dataclass(frozen=True, slots=True)
class FileTensor:
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
            from rollout_client.weights.torch_tensors import cast
        yield cast(read_tensor(self.path, self.header, self.entry), self.dtype, dtype)

    def is_tied_to(self, other: Tensor) -> bool:
        if not isinstance(other, FileTensor) or other.dtype != self.dtype:
            return False
        return all(a == b for a, b in zip(self.blocks(self.dtype), other.blocks(self.dtype), strict=True))


def file_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file or of a checkpoint's folder; raises `NotSafetensors`."""
    tensors: dict[str, Tensor] = {}
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
    """The files of a checkpoint as Hugging Face lays it out: those of its index, or its one file, or all there are."""
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
    """One file as it is, with `metadata` beside its own; raises `NotSafetensors`."""
    there = read_header(path)
    header = header_of(
        ((entry.name, entry.dtype, entry.shape) for entry in there.entries), {**there.metadata, **(metadata or {})}
    )
    return Weights(header, lambda entry: tensor_blocks(path, there, there.by_name[entry.name]))


def adapter_weights(folder: Path) -> Weights:
    """A LoRA adapter as PEFT saved it in `folder`; raises `NotSafetensors` where it did not."""
    for name in (ADAPTER_FILE, ADAPTER_CONFIG):
        if not (folder / name).is_file():
            raise NotSafetensors(f"{folder} holds no {name}: save the adapter with save_pretrained of PEFT.")
    text = (folder / ADAPTER_CONFIG).read_text()
    try:
        json.loads(text)
    except ValueError as error:
        raise NotSafetensors(f"{folder / ADAPTER_CONFIG} is no JSON: {error}") from error
    return file_weights(folder / ADAPTER_FILE, {"adapter_config": text})
