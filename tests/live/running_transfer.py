"""Transfers of weights into the engines of the running service, over gloo."""

from typing import Any

from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rollout_client.trainers.vllm_transfer import RolloutWeightSyncClient
from service.startup.config import free_port
from tests.live.gloo_transfer import GlooTrainerInitInfo, GlooTrainerWeightTransferEngine, register


def connected(transfer: RolloutWeightSyncClient, world_size: int | None, model: Any) -> GlooTrainerWeightTransferEngine:
    """The trainer's side of a transfer of the module's weights into the running service."""
    register()
    engine = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo("127.0.0.1", free_port(), world_size or 0, rank=0),
        client=transfer,
        source=ModuleSource(model),
    )
    assert isinstance(engine, GlooTrainerWeightTransferEngine)
    return engine
