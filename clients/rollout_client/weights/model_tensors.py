"""Tensors of a torch model as a source of weights, converted to those of its checkpoint. Needs `torch`.

transformers 5 computes with other tensors than checkpoints hold, for example with one tensor for all experts of a
layer. Its own conversion, as in `save_pretrained`, is applied backwards, to one group of tensors at a time, while they
are read.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from rollout_client.weights.safetensors_file import Data, SourceTensor

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TorchTensor(SourceTensor):
    """A tensor on any device, whole or sharded over several processes."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> str:
        """As safetensors names it, or torch where safetensors has no name."""
        return NAMES.get(self.tensor.dtype, str(self.tensor.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.tensor, DTensor) and self.tensor.device_mesh.size() > 1

    def gathered(self, dtype: str) -> torch.Tensor:
        """The whole tensor as `dtype`. Shards are cast before they are gathered: bf16 of f32 halves the traffic."""
        tensor = self.tensor.detach().to(DTYPES[dtype])
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def blocks(self, dtype: str) -> Iterator[Data]:
        yield data_of(self.gathered(dtype))

    def is_tied_to(self, other: SourceTensor) -> bool:
        if type(other) is not TorchTensor:
            return False
        mine, others = _local_shard(self.tensor), _local_shard(other.tensor)
        if mine.data_ptr() == others.data_ptr() and mine.stride() == others.stride() and mine.numel():
            return True
        # Shards may be equal on one process and not on another (an empty one always is): the processes would disagree.
        if isinstance(self.tensor, DTensor) or isinstance(other.tensor, DTensor):
            return False
        return mine.device == others.device and mine.dtype == others.dtype and torch.equal(mine, others)


def _local_shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def data_of(tensor: torch.Tensor) -> memoryview:
    """The data of `tensor` in host memory, as bytes."""
    flat: NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.data


def cast(data: Data, from_dtype: str, to_dtype: str) -> memoryview:
    """`data` of one floating dtype as another."""
    values = torch.frombuffer(bytearray(data), dtype=DTYPES[from_dtype]) if len(data) else torch.empty(0)
    return data_of(values.to(DTYPES[to_dtype]))


class _ConversionGroup:
    """Tensors of a model that are converted together. Memory holds the results from the first read to the last."""

    def __init__(self, model: Any, sources: Mapping[str, TorchTensor]) -> None:
        self._model = model
        self._sources = sources
        self._dtype: str | None = None
        self._results: dict[str, torch.Tensor] = {}

    @property
    def is_sharded(self) -> bool:
        return any(source.is_sharded for source in self._sources.values())

    def result(self, name: str, dtype: str) -> torch.Tensor:
        """The whole tensor `name` of the checkpoint as `dtype`; a collective operation where `is_sharded`.

        It is made again when it is read again, or as another dtype than the last one of the group.
        """
        if dtype != self._dtype or name not in self._results:
            gathered = {source: tensor.gathered(dtype) for source, tensor in self._sources.items()}
            self._results = to_checkpoint(self._model, gathered)
            self._dtype = dtype
        return self._results.pop(name)


@dataclass(frozen=True, slots=True)
class _ConvertedTensor(TorchTensor):
    """A tensor of the checkpoint that is made from tensors of the model. It counts as tied to none.

    `tensor` has the shape and the dtype, and no data.
    """

    name: str
    group: _ConversionGroup

    @property
    def is_sharded(self) -> bool:
        return self.group.is_sharded

    def gathered(self, dtype: str) -> torch.Tensor:
        return self.group.result(self.name, dtype)

    def is_tied_to(self, _other: SourceTensor) -> bool:
        return False


def checkpoint_tensors(
    model: Any, tensors: Mapping[str, TorchTensor], known: Collection[str]
) -> dict[str, TorchTensor]:
    """The tensors of `model` as those of its checkpoint, in the order of `tensors`.

    A tensor keeps its own name where `known` has that name, and not the names that the conversion gives it: a
    checkpoint may have been saved without the conversion.

    Args:
        known: the names of the checkpoint that the service has.

    Raises:
        ValueError: transformers cannot convert one of the tensors; the message names it.
    """
    outlines = {name: _outline(tensor) for name, tensor in tensors.items()}
    renamed = {id(made): name for name, made in _outlines_in_checkpoint(model, outlines).items()}
    converted = {name: made for name, made in outlines.items() if id(made) not in renamed}
    groups = {name: group for group in _conversion_groups(model, converted) for name in group}
    found: dict[str, TorchTensor] = {}
    for name, tensor in tensors.items():
        if name not in groups:
            new_name = renamed[id(outlines[name])]
            found[new_name if new_name in known or name not in known else name] = tensor
            continue
        group = groups[name]
        made = to_checkpoint(model, {each: outlines[each] for each in group})
        if name in known and not all(target in known for target in made):
            found[name] = tensor
        elif name == group[0]:
            conversion = _ConversionGroup(model, {each: tensors[each] for each in group})
            found |= {target: _ConvertedTensor(outline, target, conversion) for target, outline in made.items()}
    return found


def _conversion_groups(model: Any, outlines: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The names of `outlines`, those together that become the same tensor of the checkpoint."""
    by_target: dict[str, list[str]] = {}
    for name, tensor in outlines.items():
        targets = to_checkpoint(model, {name: tensor}).keys()
        met = {id(by_target[target]): by_target[target] for target in targets if target in by_target}
        group = [*chain.from_iterable(met.values()), name]
        if met:
            by_target = {target: group if id(other) in met else other for target, other in by_target.items()}
        by_target |= dict.fromkeys(targets, group)
    return list({id(group): group for group in by_target.values()}.values())


def _outlines_in_checkpoint(model: Any, outlines: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors at once; raises `ValueError` with the name of one that cannot be converted."""
    try:
        return to_checkpoint(model, outlines)
    except ValueError:
        for name, tensor in outlines.items():
            to_checkpoint(model, {name: tensor})
        raise


def to_checkpoint(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The conversion itself; a tensor that is only renamed stays the same object.

    Raises:
        ValueError: transformers fails; the message names the first of `tensors`.
    """
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return dict(revert_weight_conversion(model, dict(tensors)))
    except (ValueError, RuntimeError, LookupError, AttributeError, TypeError) as error:
        first = next(iter(tensors))
        raise ValueError(f"transformers cannot convert {first} to tensors of the checkpoint: {error}") from error


def _outline(tensor: TorchTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.tensor.dtype, device="meta")
