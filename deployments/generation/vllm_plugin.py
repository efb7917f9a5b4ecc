"""vLLM calls `install` in each of its processes before it configures the engine (entry point `vllm.general_plugins`).

It names the engine's shared memory by the replica, lets the engine's processes end with the replica, and works around
five faults of vLLM's build for processors.
"""

import functools
import os
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from deployments.generation.parent_death import die_with_parent
from deployments.shared_memory import name_by_owner

OPENMP_LIBRARIES = ("libgomp", "libiomp", "libomp")
ADAPTER_OPERATIONS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
"""All others of vLLM's build for processors call these."""


def install() -> None:
    """May be called more than once."""
    die_with_parent()
    name_by_owner()
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    allow_amx_tiles()
    for library in sorted(Path(torch.__file__).parent.glob("lib/libgomp.so*")):
        preload_by_name(library, os.environ)
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for module in (lora_ops, punica_cpu):
        keep_adapters_from_tokens_without(module)
    leave_out_head_adapters_of_prompts(punica_cpu.PunicaWrapperCPU)
    pack_experts_at_each_load(UnquantizedFusedMoEMethod)


def allow_amx_tiles() -> None:
    """Asks Linux for the tile registers of AMX.

    Linux kills a process with SIGILL that uses them without having asked; vLLM's bf16 attention kernel does not ask.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def keep_adapters_from_tokens_without(module: ModuleType) -> None:
    """Lets tokens of the plain weights stay as they are in a batch beside tokens of adapters.

    vLLM marks a token without an adapter by the index -1, and takes this index for the last adapter
    (vllm-project/vllm#48421).
    """
    for name in ADAPTER_OPERATIONS:
        setattr(module, name, for_tokens_with_an_adapter(getattr(module, name)))


def for_tokens_with_an_adapter(operation: Callable[..., None]) -> Callable[..., None]:
    """`operation`, with zeros as the inputs of tokens whose index is -1: an adapter adds nothing to those."""
    if getattr(operation, "leaves_out_other_tokens", False):
        return operation

    @functools.wraps(operation)
    def on_tokens_with_an_adapter(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *sizes: Any,
        **options: Any,
    ) -> None:
        operation(inputs.masked_fill(indices.unsqueeze(1) < 0, 0), weights, output, indices, *sizes, **options)

    on_tokens_with_an_adapter.leaves_out_other_tokens = True  # type: ignore[attr-defined]
    return on_tokens_with_an_adapter


def leave_out_head_adapters_of_prompts(punica_wrapper: type[Any]) -> None:
    """Lets an engine with LoRA compute the log-probabilities of prompts.

    vLLM knows which adapter belongs to each generated token, and takes the logits of a prompt's tokens for such: it
    dies of the different number of rows. Adapters that change the output layer are not scored with (`engine.py`); for
    all others there is nothing to add to the logits.
    """
    add_lora_logits = punica_wrapper.add_lora_logits
    if getattr(add_lora_logits, "leaves_out_prompts", False):
        return

    def add_to_generated_tokens(self: Any, y: torch.Tensor, x: torch.Tensor, *weights: Any, **options: Any) -> None:
        if x.view(-1, x.shape[-1]).size(0) == self.sampler_indices.size(0):
            add_lora_logits(self, y, x, *weights, **options)

    add_to_generated_tokens.leaves_out_prompts = True  # type: ignore[attr-defined]
    punica_wrapper.add_lora_logits = add_to_generated_tokens


def pack_experts_at_each_load(experts_method: type[Any]) -> None:
    """Lets the experts of a mixture be loaded again.

    vLLM packs their weights for its kernel at the first load only: after a reload the kernel would take unpacked values
    for packed ones.
    """
    setup_kernel = experts_method._setup_kernel
    if getattr(setup_kernel, "packs_at_each_load", False):
        return

    def setup_and_pack(self: Any, layer: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_packed_by_vllm = self.moe_kernel is None
        setup_kernel(self, layer, w13, w2)
        if not is_packed_by_vllm:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setup_and_pack.packs_at_each_load = True  # type: ignore[attr-defined]
    experts_method._setup_kernel = setup_and_pack


def preload_by_name(library: Path, environment: MutableMapping[str, str]) -> None:
    """Names torch's OpenMP library in LD_PRELOAD without its folder, if the folder's name contains a space.

    vLLM puts the whole path there, unless an OpenMP library is named there already. The dynamic linker splits it at the
    space: every process that is started afterwards writes errors to stderr, and the engine's threads share one core. A
    library without a folder is searched in LD_LIBRARY_PATH, which is not split at spaces.
    """
    preloaded = environment.get("LD_PRELOAD", "")
    has_space = any(map(str.isspace, str(library)))
    if not has_space or any(name in preloaded for name in OPENMP_LIBRARIES):
        return
    environment["LD_PRELOAD"] = ":".join(filter(None, (preloaded, library.name)))
    searched = environment.get("LD_LIBRARY_PATH")
    environment["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(library.parent), searched)))
