"""Torch modules and state dicts as a source of weights, sharded ones included. Needs the extra `torch`."""

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from rollout_client.contract.policy import PolicyLayout
from rollout_client.weights.layout import WRAPPERS, fitted
from rollout_client.weights.merged_adapters import AdaptedLayers
from rollout_client.weights.model_tensors import ConvertedTensor, checkpoint_tensors
from rollout_client.weights.torch_tensor import TorchTensor


@dataclass(frozen=True, slots=True)
class GatheredState:
    """The tensors of `module` that its processes have gathered into one state dict, under the names in `module`."""

    module: nn.Module
    state: Mapping[str, torch.Tensor]


TorchSource: TypeAlias = nn.Module | GatheredState | Mapping[str, torch.Tensor]
CollectedTensor: TypeAlias = TorchTensor | ConvertedTensor


def torch_tensors(source: TorchSource, layout: PolicyLayout, is_partial: bool = False) -> dict[str, CollectedTensor]:
    """The tensors of a module or of a state dict, under their names without wrappers; other values are ignored.

    Those of a transformers module are converted to the tensors of its checkpoint.

    Args:
        layout: of the service's model.
        is_partial: leave out the parameters of a module that are frozen (`requires_grad=False`).

    Raises:
        AdapterNotMerged: the module has an adapter of PEFT that is not merged into its weights.
        ValueError: a tensor cannot be converted; the message names it.
    """
    module = source if isinstance(source, nn.Module) else source.module if isinstance(source, GatheredState) else None
    tensors = state_of(source)
    if module is None:
        return dict(without_wrappers(tensors))
    adapted = AdaptedLayers(module)
    if is_partial:
        # What is merged into the parameters of an adapted layer changes them, although they are frozen.
        frozen = {name for name in frozen_parameters(module) if name not in adapted}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in frozen}
    tensors = without_wrappers(adapted.unwrapped(tensors))
    if (model := transformers_model(module)) is None:
        return dict(tensors)
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    saved = {name: tensor for name, tensor in tensors.items() if name not in unsaved}
    return checkpoint_tensors(model, saved, layout.tensors)


def state_of(source: TorchSource) -> dict[str, TorchTensor]:
    if isinstance(source, GatheredState):
        source = source.state
    state = source.state_dict() if isinstance(source, nn.Module) else source
    return {name: TorchTensor(tensor) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def without_wrappers(tensors: Mapping[str, TorchTensor]) -> dict[str, TorchTensor]:
    plain = {name: WRAPPERS.sub("", name) for name in tensors}
    count = Counter(plain.values())
    # Of several tensors with one name the wrapped ones keep theirs, so that they are refused and not lost.
    return {name if count[plain[name]] > 1 else plain[name]: tensor for name, tensor in tensors.items()}


def frozen_parameters(module: nn.Module) -> set[str]:
    return {name for name, each in module.named_parameters(remove_duplicate=False) if not each.requires_grad}


def transformers_model(module: nn.Module) -> Any | None:
    """The model of transformers 5 or newer that `module` is or wraps; older ones have the tensors of a checkpoint."""
    if "transformers.core_model_loading" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    for name, inner in module.named_modules():
        if isinstance(inner, PreTrainedModel):
            return inner if not WRAPPERS.sub("", name and f"{name}.") else None
    return None


def gather(source: TorchSource, layout: PolicyLayout, is_partial: bool = False) -> None:
    """Takes part in gathering a sharded model. Every process calls it, except the one that pushes, at the same time.

    Args:
        is_partial: whether that process pushes with `kind="partial"`.

    Raises:
        WeightsDoNotFit: the weights do not fit; the process that pushes raises it too.
    """
    for name, tensor in fitted(torch_tensors(source, layout, is_partial), layout, is_partial).items():
        if tensor.is_sharded:
            tensor.gathered(layout.tensors[name].dtype)
