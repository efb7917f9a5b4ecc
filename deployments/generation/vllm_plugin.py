"""What vLLM needs from us in each of its processes before the engine's first step (entry point `vllm.general_plugins`).

Linux kills a process with SIGILL that touches the tile registers of AMX without having asked for them, and vLLM's bf16
attention kernel does not ask. And `weight_transfer_config: {backend: gloo}` must mean something.
"""

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

GLOO = "deployments.generation.gloo_transfer"


def install() -> None:
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", GLOO, "GlooWeightTransferEngine")
        WeightTransferTrainerFactory.register_engine("gloo", GLOO, "GlooTrainerWeightTransferEngine")
