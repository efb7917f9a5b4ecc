"""Adapters in vLLM's build for processors: one matrix product an adapter, and nothing for tokens that have none.

vLLM copies an adapter's matrix for each token of a batch, also where the matrix is zero because the adapter leaves the
layer alone; and it marks a token without an adapter by the index -1, which it then takes for the last adapter.

Model runners: V1, and V2 where it is made to run on processors (`benchmarks/gpu_check/rig`).

Needed with vLLM 0.32. Known upstream: tokens without an adapter (vllm-project/vllm#48421); no issue is known for the
copies. vLLM's build for GPUs has neither.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch


def install() -> None:
    """May be called more than once, before the engine is configured."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    # All other operations of this build call these.
    for module in (lora_ops, punica_cpu):
        _multiply_once_an_adapter(module)


def _multiply_once_an_adapter(module: ModuleType) -> None:
    """Replaces vLLM's operations there."""
    operations: Any = module
    operations.bgmv_shrink, operations.bgmv_expand = shrink, expand
    operations.bgmv_expand_slice = _expand_slice


def shrink(
    inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, scaling: float = 1.0
) -> None:
    """Sets `output` [tokens, at least rank] to the scaled products of `inputs` [tokens, width] with their adapters.

    Args:
        weights: [adapters, 1, rank, width].
        indices: [tokens]: the adapter of each token; -1 for none, whose product is 0.
    """
    rank = weights.shape[-2]
    output[:, :rank] = 0
    for adapter, rows in _rows_by_adapter(indices):
        matrix = weights[adapter].view(weights.shape[-2:])
        output[rows, :rank] = scaling * (inputs[rows].to(output.dtype) @ matrix.to(output.dtype).T)


def expand(
    inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, add_inputs: bool = True
) -> None:
    """As `_expand_slice`, on as many columns as weights and `output` both have: the two may be padded differently."""
    size = min(weights.shape[-2], output.shape[1])
    _expand_slice(inputs, weights[..., :size, :], output, indices, 0, size, add_inputs)


def _expand_slice(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = False,
) -> None:
    """Adds the products of `inputs` [tokens, rank] with their adapters to columns of `output` [tokens, columns].

    Args:
        weights: [adapters, 1, slice_size, rank].
        indices: [tokens]: the adapter of each token; -1 for none.
        add_inputs: false sets the columns in place of adding to them; those of a token without an adapter to 0.
    """
    columns = output[:, slice_offset : slice_offset + slice_size]
    if not add_inputs:
        columns.zero_()
    for adapter, rows in _rows_by_adapter(indices):
        shrunk = inputs[rows]
        if shrunk.any():
            matrix = weights[adapter].reshape(slice_size, weights.shape[-1])
            columns[rows] += shrunk.to(output.dtype) @ matrix.to(output.dtype).T


def _rows_by_adapter(indices: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields each adapter with its rows."""
    for adapter in sorted(set(indices.tolist()) - {-1}):
        yield adapter, (indices == adapter).nonzero()[:, 0]
