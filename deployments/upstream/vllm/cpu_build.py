"""Faults of vLLM's build for processors: AMX and packed weights.

Model runners: V1, and V2 where it is made to run on processors (`benchmarks/gpu_check/rig`).

Needed with vLLM 0.32; no upstream issue is known. vLLM's build for GPUs has none of them.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch

PROBE_ROWS = 128


def install() -> None:
    """May be called more than once, before the engine is configured."""
    _allow_amx_tiles()
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    _pack_experts_at_each_load(UnquantizedFusedMoEMethod)


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
