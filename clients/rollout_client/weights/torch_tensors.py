"""Torch modules and state dicts as a source of weights, sharded ones included. Needs the extra `torch`.

Modules that PEFT has wrapped give the tensors of the model inside, with merged adapters; PEFT's layers are known by
their attributes, so PEFT need not be installed.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from rollout_client.contract.policy import PolicyLayout
from rollout_client.weights.layout import WRAPPERS, fitted
from rollout_client.weights.model_tensors import TorchTensor, checkpoint_tensors

T = TypeVar("T")


class AdapterNotMerged(ValueError):
    """The weights of a module lack those of its adapter; nothing was sent."""


class _AdaptedLayers:
    """The layers of `module` that PEFT has wrapped.

    Raises:
        AdapterNotMerged: an adapter is not merged into the layer that it adapts.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kept: dict[str, str] = {}
        """Name of the module inside a layer whose tensors the model has, by layer."""
        for name, layer in module.named_modules():
            if hasattr(layer, "base_layer") and hasattr(layer, "merged"):
                if not layer.merged:
                    raise AdapterNotMerged(
                        f"The adapter of {name} is not merged, so the weights lack what it has learned. Call "
                        "merge_adapter() before the push and unmerge_adapter() after it, or push the adapter itself "
                        'with kind="adapter".'
                    )
                self._kept[name] = f"{name}.base_layer"
            elif hasattr(layer, "original_module") and hasattr(layer, "modules_to_save"):
                [active] = layer.active_adapters
                self._kept[name] = f"{name}.modules_to_save.{active}"

    def __contains__(self, name: str) -> bool:
        """Whether the tensor `name` lies in one of them."""
        return self._layer_of(name) is not None

    def unwrapped(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """`tensors` of the module under the names that the model has for them; those of adapters are left out."""
        found: dict[str, T] = {}
        for name, tensor in tensors.items():
            layer = self._layer_of(name)
            if layer is None:
                found[name] = tensor
            elif name.startswith(f"{self._kept[layer]}."):
                found[layer + name.removeprefix(self._kept[layer])] = tensor
        return found

    def _layer_of(self, name: str) -> str | None:
        parent = name.rpartition(".")[0]
        while parent and parent not in self._kept:
            parent = parent.rpartition(".")[0]
        return parent or None


@dataclass(frozen=True, slots=True)
class GatheredState:
    """The tensors of `module` that its processes have gathered into one state dict, under the names in `module`."""

    module: nn.Module
    state: Mapping[str, torch.Tensor]


TorchSource: TypeAlias = nn.Module | GatheredState | Mapping[str, torch.Tensor]


def torch_tensors(source: TorchSource, layout: PolicyLayout, is_partial: bool = False) -> dict[str, TorchTensor]:
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
    given = source.state if isinstance(source, GatheredState) else source
    state = given.state_dict() if isinstance(given, nn.Module) else given
    tensors = {name: TorchTensor(tensor) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    if module is None:
        return _without_wrappers(tensors)
    adapted = _AdaptedLayers(module)
    if is_partial:
        # Merging changes the parameters of an adapted layer, although they are frozen.
        parameters = module.named_parameters(remove_duplicate=False)
        frozen = {name for name, each in parameters if not each.requires_grad and name not in adapted}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in frozen}
    tensors = _without_wrappers(adapted.unwrapped(tensors))
    if (model := _transformers_model(module)) is None:
        return tensors
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    saved = {name: tensor for name, tensor in tensors.items() if name not in unsaved}
    return checkpoint_tensors(model, saved, layout.tensors)


def _without_wrappers(tensors: Mapping[str, TorchTensor]) -> dict[str, TorchTensor]:
    plain = {name: WRAPPERS.sub("", name) for name in tensors}
    count = Counter(plain.values())
    # Of several tensors with one name the wrapped ones keep theirs, so that they are refused and not lost.
    return {name if count[plain[name]] > 1 else plain[name]: tensor for name, tensor in tensors.items()}


def _transformers_model(module: nn.Module) -> Any | None:
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

    Where that one fails before it has read all tensors, this waits until the timeout of the process group.

    Args:
        is_partial: whether that process pushes with `kind="partial"`.

    Raises:
        WeightsDoNotFit: the weights do not fit; the process that pushes raises it too.
    """
    for name, tensor in fitted(torch_tensors(source, layout, is_partial), layout, is_partial).items():
        if tensor.is_sharded:
            tensor.gathered(layout.tensors[name].dtype)
