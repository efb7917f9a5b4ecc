"""From the tensors of a transformers model to those of its checkpoint, as `save_pretrained` writes them.

transformers 5 computes with other tensors than checkpoints hold, for example with one tensor for all experts of a
layer. Its own conversion is applied backwards, to one group of tensors at a time, while they are read.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from rollout_client.weights.safetensors_file import Data
from rollout_client.weights.tensor import SourceTensor
from rollout_client.weights.torch_tensor import TorchTensor, data_of, dtype_name


class ConversionGroup:
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
class ConvertedTensor(SourceTensor):
    """A tensor of the checkpoint that is made from tensors of the model. It counts as tied to none."""

    name: str
    outline: torch.Tensor
    """Has the shape and the dtype, and no data."""
    group: ConversionGroup

    @property
    def dtype(self) -> str:
        return dtype_name(self.outline)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.outline.shape)

    @property
    def is_sharded(self) -> bool:
        return self.group.is_sharded

    def gathered(self, dtype: str) -> torch.Tensor:
        return self.group.result(self.name, dtype)

    def blocks(self, dtype: str) -> Iterator[Data]:
        yield data_of(self.gathered(dtype))

    def is_tied_to(self, _other: SourceTensor) -> bool:
        return False


def checkpoint_tensors(
    model: Any, tensors: Mapping[str, TorchTensor], known: Collection[str]
) -> dict[str, TorchTensor | ConvertedTensor]:
    """The tensors of `model` as those of its checkpoint, in the order of `tensors`.

    A tensor keeps its own name where `known` has that name, and not the names that the conversion gives it: a
    checkpoint may have been saved without the conversion.

    Args:
        known: the names of the checkpoint that the service has.

    Raises:
        ValueError: transformers cannot convert one of the tensors; the message names it.
    """
    outlines = {name: outline(tensor) for name, tensor in tensors.items()}
    renamed = {id(made): name for name, made in outlines_in_checkpoint(model, outlines).items()}
    converted = {name: made for name, made in outlines.items() if id(made) not in renamed}
    groups = {name: group for group in conversion_groups(model, converted) for name in group}
    found: dict[str, TorchTensor | ConvertedTensor] = {}
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
            conversion = ConversionGroup(model, {each: tensors[each] for each in group})
            found |= {target: ConvertedTensor(target, made[target], conversion) for target in made}
    return found


def conversion_groups(model: Any, outlines: Mapping[str, torch.Tensor]) -> list[list[str]]:
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


def outlines_in_checkpoint(model: Any, outlines: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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


def outline(tensor: TorchTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.tensor.dtype, device="meta")
