"""Private parts of vLLM's weight transfer, reload and adapters, where a failure would come late or be left unsaid.

Needed with vLLM 0.32. No issue is open for them: vLLM has no public way to ask for its transfer backends, to give up a
reload or a transfer halfway, or to learn which tensors of an adapter change nothing.
"""

from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.lora_model import LoRAModel
from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name
from vllm.model_executor.model_loader.reload.layerwise import LOADING_LAYERS, _place_kernel_tensors, get_layerwise_info


def reject_unknown_backend(args: AsyncEngineArgs) -> None:
    """Raises `ValueError` with the backends that exist; vLLM itself fails later, in a worker process."""
    backends = WeightTransferEngineFactory._registry.keys()
    if args.weight_transfer_config is not None and args.weight_transfer_config.backend not in backends:
        raise ValueError(
            f"engine.weight_transfer_config.backend: {args.weight_transfer_config.backend!r} does not exist; "
            f"vLLM has {', '.join(sorted(backends))}"
        )


async def pause_scheduler(llm: Any, mode: str, clear_cache: bool) -> None:
    """Pauses as `AsyncLLM.pause_generation` does, which then sleeps for longer than the swap of a small model takes."""
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)


def forget_weight_update(worker: Any) -> None:
    """Lets a worker of vLLM's take a new update although the last one did not end."""
    worker._weight_update_active = False
    worker.weight_transfer_engine.reset_weight_update_target()


def end_broken_reload(model: Any) -> None:
    """Puts the tensors that the engine computes with back in their places, if vLLM was about to load others.

    vLLM goes on with a reload that did not end: it would take what had arrived of it for a part of the next one.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()  # type: ignore[no-untyped-call]
    LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def unplaced_matrices(names: list[str], lora_manager: Any) -> list[str]:
    """The tensors of an adapter for which the worker has no module, by the names and rules by which vLLM reads them.

    It passes over copies of embeddings, and tensors that a model declares unnecessary for inference.

    Args:
        lora_manager: vLLM's `LRUCacheWorkerLoRAManager`.
    """
    manager = lora_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    skipped = list(getattr(manager.model, "lora_skip_prefixes", None) or ())
    parts = (part for parts in manager.packed_modules.values() for part in parts)
    # A checkpoint with fused experts has their first matrices under this name, and the second ones under the module's.
    fused = (f"{module}.base_layer" for module in manager.modules if module.endswith(".experts"))
    placed = {*manager.modules, *parts, *fused}

    def is_placed(name: str) -> bool:
        if is_base_embedding_weights(name) or LoRAModel._should_skip_module(name, skipped):
            return True
        try:
            module, _ = parse_fine_tuned_lora_name(name, mapper)
        except ValueError:
            return False
        return module in placed

    return [name for name in names if not is_placed(name)]
