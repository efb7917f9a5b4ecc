"""Deltas as patches of an engine's weights: vLLM maps places in the checkpoint to places in its own tensors.

For engines whose tensors hold the checkpoint's values as they are: neither quantized nor packed, as vLLM's build for
processors packs them. Tested with vLLM's own function on small modules; docs/gpu.md says what has run on a GPU.
"""

from collections.abc import Iterator

import torch
from safetensors import safe_open
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from rollout_client.weights.delta import GAPS, VALUES

STAGED_BYTES = 64 * 2**20
"""vLLM fills tensors of the checkpoint's shapes on the device, as many together as have this size, or one."""


def read_patches(delta: str, full: str) -> list[CheckpointWeightPatch]:
    """Reads the patches of a delta.

    Args:
        delta: path of the delta.
        full: path of the weights that it makes, of which only the header is read.

    Raises:
        ValueError: it changes values that are not floating, which vLLM cannot patch.
    """
    with safe_open(delta, framework="pt") as changes, safe_open(full, framework="pt") as weights:
        return [
            _patch_of(
                name,
                tuple(weights.get_slice(name).get_shape()),
                changes.get_tensor(name + GAPS),
                changes.get_tensor(name + VALUES),
            )
            for name in _changed_names(changes.keys())
        ]


def _changed_names(names: list[str]) -> Iterator[str]:
    return (name.removesuffix(VALUES) for name in names if name.endswith(VALUES))


def _patch_of(name: str, shape: tuple[int, ...], gaps: torch.Tensor, values: torch.Tensor) -> CheckpointWeightPatch:
    if not values.is_floating_point():
        raise ValueError(f"{name} is {values.dtype}; only floating values can be patched: send full weights")
    return CheckpointWeightPatch(name, shape, values.dtype, values, torch.cumsum(gaps, 0, dtype=torch.int64))


def apply_patches(model: torch.nn.Module, patches: list[CheckpointWeightPatch]) -> None:
    """Changes the model's weights in place.

    Raises:
        Exception: what vLLM raises for a model that it cannot patch; the weights are a mixture then.
    """
    device = next(model.parameters()).device
    on_device = (
        patch._replace(values=patch.values.to(device), indices=patch.indices.to(device))
        for patch in patches
        if patch.indices is not None
    )
    # A delta names each place once: it counts them by their distances.
    load_checkpoint_weight_patches(model, on_device, max_chunk_bytes=STAGED_BYTES, validate_unique_indices=False)
