"""A vLLM plugin (entry point `vllm.general_plugins`) for processors with AMX tiles.

Linux kills a process with SIGILL that touches the tile registers without having asked for them, and vLLM's bf16
attention kernel does not ask. Plugins run in each of vLLM's processes before its first forward pass: early enough.
"""

import torch


def request_tile_permission() -> None:
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
