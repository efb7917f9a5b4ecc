"""What vLLM makes of engine settings on a Hopper card, on a machine without one. Starts no engine.

    python -m tests.deployments.generation.faked_card < settings.json > found.json

Reads a list of `engine` sections, and writes for each what vLLM would run, or its error. A process of its own: vLLM
believes in the card from its first import on. Its build for processors lacks the kernels, which are stubs here.
"""

import json
import os
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
    sys.modules[name] = MagicMock()

import vllm._custom_ops as kernels  # noqa: E402
import vllm.platforms as platforms  # noqa: E402
from vllm.platforms.cuda import CudaPlatformBase  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402

CAPABILITY = DeviceCapability(9, 0)
CARDS = 8
CARD_BYTES = 85_520_809_984


class HopperCard(CudaPlatformBase):
    """An H100 of 80 GB, of which the machine has eight."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:  # noqa: ARG003
        return CAPABILITY

    @classmethod
    def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:  # noqa: ARG003
        wanted = capability if isinstance(capability, tuple) else divmod(capability, 10)
        return wanted <= (9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:  # noqa: ARG003
        return "NVIDIA H100 80GB HBM3"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:  # noqa: ARG003
        return CARD_BYTES

    @classmethod
    def is_fully_connected(cls, device_ids: list[int]) -> bool:  # noqa: ARG003
        return True

    @classmethod
    def device_count(cls) -> int:
        return CARDS

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:  # noqa: ARG003
        return 132

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return True

    @classmethod
    def log_warnings(cls) -> None:
        """There is no driver to ask."""


def found(engine: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from deployments.generation.settings import EngineSettings

    settings = EngineSettings.model_validate(engine)
    os.environ.update(settings.process_variables)
    arguments = AsyncEngineArgs(**settings.engine_args(), skip_tokenizer_init=True)
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    return {
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "executor": config.parallel_config.distributed_executor_backend,
        "world_size": config.parallel_config.world_size,
        "max_model_len": config.model_config.max_model_len,
        "gpus": settings.ray_actor_options()["num_gpus"],
        "defaults": config.model_config.get_diff_sampling_param(),
    }


if __name__ == "__main__":
    # vLLM writes to standard output too.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        platforms._current_platform = HopperCard()  # type: ignore[assignment]
        for name in dir(kernels):
            if "supports" in name:
                setattr(kernels, name, lambda *_: True)
        json.dump([found(engine) for engine in json.load(sys.stdin)], answer)
