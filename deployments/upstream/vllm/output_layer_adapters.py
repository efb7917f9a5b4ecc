"""Adapters of the output layer, which the engine does not take.

vLLM knows which adapter belongs to each token to be generated, and takes the rows of a prompt for such: with an output
layer that takes adapters it adds those of other rollouts to a prompt's log-probabilities, or dies of the different
number of rows.

Model runners: V1 and V2.

Needed with vLLM 0.32; no upstream issue is known.
"""

from types import ModuleType
from typing import Any


def leave_output_layer_without_adapters(manager: ModuleType) -> None:
    """Patches vLLM's `vllm.lora.model_manager`, which passes over a layer that was not wrapped."""
    of_manager: Any = manager
    of_manager.from_layer_logits_processor = _unwrapped


def _unwrapped(layer: Any, *_arguments: Any) -> Any:
    return layer
