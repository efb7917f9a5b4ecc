"""Faults of vLLM's build for processors: AMX, packed weights, adapters, and what verifies drafts.

vLLM copies an adapter's matrix for each token of a batch, also where the matrix is zero because the adapter leaves the
layer alone; and it marks a token without an adapter by the index -1, which it then takes for the last adapter. Here it
is one matrix product an adapter, and nothing for tokens that have none.

With drafts, the kernel that repeats temperature, top-k and top-p for each of them writes into a copy: the distribution
is one of whatever lay in memory. A step without drafts, of requests with top-k alone, looks for the highest of none.

oneDNN's kernels are kept by the size of a weight, with the layout of the first that had it. Once numba has been used,
as n-gram drafts do, weights that are loaded again may be packed in another: the kernel multiplies by other values.

Model runners: V1, and V2 where it is made to run on processors (`benchmarks/gpu_check/rig`).

Needed with vLLM 0.32. Known upstream: tokens without an adapter (vllm-project/vllm#48421), the kernel
(vllm-project/vllm#55005); no issue is known for the rest. vLLM's build for GPUs has none of them.
"""

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

PROBE_ROWS = 128
_TRIED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROUNDING = 0.05
"""Error of a product in bfloat16, at most; a block of weights in another place changes more."""


def install() -> None:
    """May be called more than once, before the engine is configured."""
    _allow_amx_tiles()
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    _pack_experts_at_each_load(UnquantizedFusedMoEMethod)
    vars(rejection_sampler)["expand_batch_to_tokens"] = _for_each_draft
    _leave_no_rows(topk_topp_sampler)
    _try_packed_weights(utils)
    # All other operations of this build call these.
    for module in (lora_ops, punica_cpu):
        _multiply_once_an_adapter(module)


def _allow_amx_tiles() -> None:
    """Asks Linux for the tile registers of AMX.

    Linux kills a process with SIGILL that uses them without having asked; vLLM's bf16 attention kernel does not ask.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _pack_experts_at_each_load(experts_method: type[Any]) -> None:
    """Lets the experts of a mixture be loaded again.

    vLLM packs their weights for its kernel at the first load only: after a reload the kernel would take unpacked values
    for packed ones.
    """
    setup_kernel = experts_method._setup_kernel
    if getattr(setup_kernel, "packs_at_each_load", False):
        return

    @functools.wraps(setup_kernel)
    def setup_and_pack(self: Any, layer: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_packed_by_vllm = self.moe_kernel is None
        setup_kernel(self, layer, w13, w2)
        if not is_packed_by_vllm:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setup_and_pack.packs_at_each_load = True  # type: ignore[attr-defined]
    experts_method._setup_kernel = setup_and_pack


def _for_each_draft(
    values: torch.Tensor, ends: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeats each request's value for its drafts [num_tokens]; `replace_from` becomes `replace_to`.

    Args:
        values: [requests].
        ends: [requests]: the number of drafts up to each request and with it.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    return torch.where(values == replace_from, replace_to, values).repeat_interleave(counts, output_size=num_tokens)


def _leave_no_rows(sampler: Any) -> None:
    """Lets the top-k of no rows be no rows."""
    apply_top_k_only = sampler.apply_top_k_only
    if hasattr(apply_top_k_only, "__wrapped__"):
        return

    @functools.wraps(apply_top_k_only)
    def of_any_rows(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return apply_top_k_only(logits, k) if len(logits) else logits

    sampler.apply_top_k_only = of_any_rows


def _try_packed_weights(layers: Any) -> None:
    """Lets a layer compute with its weight as it is where the kernel multiplies by other values than it has."""
    dispatch = layers.dispatch_cpu_unquantized_gemm
    if hasattr(dispatch, "__wrapped__"):
        return

    @functools.wraps(dispatch)
    def dispatch_and_try(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight.detach()
        dispatch(layer, remove_weight)
        if weight.ndim != 2 or weight.dtype not in _TRIED_DTYPES or not hasattr(layer, "cpu_linear"):
            return
        # One row: a kernel for it is there as soon as one layer of the size was tried.
        row = torch.randn(1, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        expected = torch.nn.functional.linear(row, weight).float()
        found = layer.cpu_linear(row, layer.weight, None).float()
        if not (found - expected).norm() <= _ROUNDING * expected.norm():
            # Some of vLLM's kernels take, and leave, a bias in float32.
            layer.cpu_linear = lambda x, _weight, bias: torch.nn.functional.linear(
                x, weight, None if bias is None else bias.to(x.dtype)
            )

    layers.dispatch_cpu_unquantized_gemm = dispatch_and_try


def pack_shared_weights_again(model: torch.nn.Module) -> None:
    """Updates the packed copies of weights that several layers share, such as embeddings and output layer.

    vLLM's build for processors computes with a packed copy of each layer's weight. A reload packs it anew for the
    layer under whose name the checkpoint has it; the other layers would go on computing with their old copies.
    """
    owners = set[int]()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "cpu_linear") or not isinstance(weight, torch.Tensor) or not weight.numel():
            continue
        if weight.data_ptr() in owners:
            quant_method: Any = module.quant_method
            quant_method.process_weights_after_loading(module)
        owners.add(weight.data_ptr())


def packed_weight_slices(module: Any, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """The values of a linear layer's weight that vLLM has packed for its kernel, which empties the parameter.

    They are read through the kernel: multiplying rows of the identity matrix returns each value exactly.
    """
    if (kernel := getattr(module, "cpu_linear", None)) is None:
        return
    # A layer that is the same on all workers has no partition.
    width = getattr(module, "input_size_per_partition", module.input_size)
    for first in range(0, width, PROBE_ROWS):
        rows = torch.eye(min(PROBE_ROWS, width - first), width - first, dtype=parameter.dtype)
        yield kernel(torch.nn.functional.pad(rows, (first, 0)), parameter, None)


def _multiply_once_an_adapter(module: ModuleType) -> None:
    """Replaces vLLM's operations there."""
    operations: Any = module
    operations.bgmv_shrink, operations.bgmv_expand = _shrink, _expand
    operations.bgmv_expand_slice = _expand_slice


def _shrink(
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


def _expand(
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
