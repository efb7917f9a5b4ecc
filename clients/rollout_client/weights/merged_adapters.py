"""Modules that PEFT has wrapped: their tensors under the names of the model inside, with the adapters merged into them.

Knows PEFT's layers by their attributes, so PEFT need not be installed.
"""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

T = TypeVar("T")


class AdapterNotMerged(ValueError):
    """The weights of a module lack what its adapter adds to them; nothing was sent."""


class AdaptedLayers:
    """The layers of `module` that PEFT has wrapped.

    Raises:
        AdapterNotMerged: an adapter is not merged into the layer that it adapts.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kept: dict[str, str] = {}
        """By the name of a layer, the name of the module in it whose tensors the model has."""
        for name, layer in module.named_modules():
            if hasattr(layer, "base_layer") and hasattr(layer, "merged"):
                refuse_unmerged(name, layer)
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


def refuse_unmerged(name: str, layer: nn.Module) -> None:
    if not layer.merged:
        raise AdapterNotMerged(
            f"The adapter of {name} is not merged, so the weights lack what it has learned. Call merge_adapter() "
            'before the push and unmerge_adapter() after it, or push the adapter itself with kind="adapter".'
        )
