"""Converts the sources of a trainer (a torch module, a state dict, files) to the weights that a push sends.

Nothing is read before it is sent; memory then holds one tensor, or one block of a file.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from rollout_client.contract.policy import PolicyLayout, WeightsKind
from rollout_client.errors import needed_for
from rollout_client.weights.file_tensors import (
    adapter_weights,
    file_tensors,
    file_weights,
    module_adapter,
    with_accepted_rank,
)
from rollout_client.weights.layout import fitted
from rollout_client.weights.safetensors_file import SourceTensor, Weights, header_of

if TYPE_CHECKING:
    import torch

    from rollout_client.weights.torch_tensors import GatheredState

TensorsSource: TypeAlias = Union[
    "torch.nn.Module", "GatheredState", "Mapping[str, torch.Tensor]", str, os.PathLike[str]
]
"""Full weights as a trainer has them. A path is a `.safetensors` file or a folder of them."""
WeightsSource: TypeAlias = TensorsSource | Weights
FORMAT = {"format": "pt"}
"""Metadata without which transformers refuses to load a file."""


def needs_layout(source: WeightsSource, kind: WeightsKind) -> bool:
    """Whether `weights_to_send` needs the layout of the service's model for this source."""
    return kind != "delta" and not isinstance(source, Weights)


def weights_to_send(source: WeightsSource, kind: WeightsKind, layout: PolicyLayout | None) -> Weights:
    """The weights that a push of `source` sends.

    Args:
        layout: of the service's model, where `needs_layout` says so.

    Raises:
        WeightsDoNotFit: full or partial weights do not fit `layout`.
        RankTooHigh: the engines do not take adapters of this rank.
        NotSafetensors: a file is not a safetensors file.
        ValueError: weights of this kind cannot be read from such a source.
    """
    if isinstance(source, Weights):
        return source
    if layout is not None and kind != "adapter":
        return full_weights(source, layout, is_partial=kind == "partial")
    if kind == "adapter" and hasattr(source, "peft_config"):
        return with_accepted_rank(module_adapter(source), layout)
    if not isinstance(source, str | os.PathLike):
        advice = "save the adapter, or pass PEFT's own module" if kind == "adapter" else "see PolicyPusher"
        raise ValueError(f"{kind} weights come from a path, not from {type(source).__name__}; {advice}.")
    return (
        with_accepted_rank(adapter_weights(Path(source)), layout) if kind == "adapter" else file_weights(Path(source))
    )


def full_weights(source: TensorsSource, layout: PolicyLayout, is_partial: bool = False) -> Weights:
    """`source` with the tensors and dtypes of `layout`, in the order of the source.

    Floating tensors are cast. A tensor that `layout` does not name is left out if it is tied to one that it names.

    Args:
        is_partial: a module contributes only its trained parameters, any other source only the tensors that it has.

    Raises:
        WeightsDoNotFit: a name or shape differs, or a dtype that cannot be cast.
        NotSafetensors: a file is not a safetensors file.
        ValueError: partial weights without any tensor, or a tensor that has no counterpart in a checkpoint.
    """
    tensors = fitted(_tensors_of(source, layout, is_partial), layout, is_partial)
    if is_partial and not tensors:
        raise ValueError("There is no tensor to send: the source holds none, or all its parameters are frozen.")
    header = header_of(((name, layout.tensors[name].dtype, tensor.shape) for name, tensor in tensors.items()), FORMAT)
    is_repeatable = not any(tensor.is_sharded for tensor in tensors.values())
    return Weights(header, lambda entry: tensors[entry.name].blocks(entry.dtype), is_repeatable)


def _tensors_of(source: TensorsSource, layout: PolicyLayout, is_partial: bool = False) -> Mapping[str, SourceTensor]:
    if isinstance(source, str | os.PathLike):
        return file_tensors(Path(source))
    with needed_for("Sending torch tensors", "torch"):
        from rollout_client.weights.torch_tensors import torch_tensors
    return torch_tensors(source, layout, is_partial)
