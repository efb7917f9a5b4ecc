"""Transfers of weights into the engines of the running service, by vLLM's own client over gloo."""

from typing import Any

from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rollout_client import RolloutClient
from service.startup.config import free_port
from tests.live.gloo_transfer import GlooTrainerInitInfo, GlooTrainerWeightTransferEngine, register


def connected(client: RolloutClient, model: Any) -> GlooTrainerWeightTransferEngine:
    """The trainer's side of a transfer of the module's weights into the running service."""
    register()
    world_size = client.policy.state().transfer_world_size or 0
    engine = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo("127.0.0.1", free_port(), world_size, rank=0),
        client=HTTPVLLMWeightSyncClient(client.base_url),
        source=ModuleSource(model),
    )
    assert isinstance(engine, GlooTrainerWeightTransferEngine)
    return engine
