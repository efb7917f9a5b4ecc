"""Transfers of weights into the engines of the running service, by vLLM's own client over gloo."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from rollout_client import RolloutClient
from service.startup.config import free_port
from tests.live.gloo_transfer import GlooEndpoint, update_info_of


class ConnectedTrainer:
    """The trainer's side of a transfer of the module's weights into the running service."""

    def __init__(self, client: RolloutClient, model: Any) -> None:
        world_size = client.policy.state().transfer_world_size or 0
        where = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": world_size}
        self.calls = HTTPVLLMWeightSyncClient(client.base_url)
        self.source = ModuleSource(model)
        self.update_info = asdict(update_info_of(self.source.metadata()))
        with ThreadPoolExecutor(1) as pool:
            calling = pool.submit(self.calls.init_weight_transfer_engine, where)
            self.endpoint = GlooEndpoint(where, calling)
            calling.result()

    def send_weights(self) -> None:
        self.calls.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(self.calls.update_weights, self.update_info)
            self.endpoint.send(self.source, receiving)
            receiving.result()
        self.calls.finish_weight_update()
