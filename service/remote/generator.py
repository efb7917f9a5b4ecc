"""The `Generator` port over Serve handles. Server half: `deployments/rpc/generator_replica_base.py`."""

import asyncio
from functools import partial
from typing import Any
from uuid import uuid4

from ray.serve.handle import DeploymentHandle

from deployments.failures import GenerationCut, GenerationLost, Overloaded
from deployments.protocols import (
    Generation,
    GenerationRequest,
    GenerationResults,
    Generator,
    GeneratorDescription,
    ReplicaLoad,
)
from deployments.rpc.batching import BatchResults
from deployments.rpc.handle_calls import call_result
from deployments.rpc.live_replicas import live_replicas_of
from deployments.rpc.message_size import bytes_of_generation_request
from service.remote.batching import RequestBatcher
from service.remote.replica_affinity import ReplicaAffinity

GENERATOR_REPLICA = "The generator replica"
LOST_AFTER_HEARTBEATS = 10
"""A replica's event loop can stall for seconds, while it reads weights or compiles; a hung one stalls for ever."""


class RemoteGenerator(Generator):
    """Sends each generation to the replica that has the rollout's prefix cached, batched with others for it."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._affinity = ReplicaAffinity()
        self._batchers: dict[str | None, RequestBatcher[GenerationRequest, Generation]] = {}
        """By replica; `None` for requests that were made before any replica was known."""
        self._caller = uuid4().hex
        self._loads: dict[str | None, ReplicaLoad] = {}
        """What each replica said last."""

    async def generate(self, request: GenerationRequest) -> Generation:
        replicas = live_replicas_of(self._handle)
        replica = self._affinity.replica_for(request.rollout_id, request.group, replicas)
        if replica not in self._batchers:
            self._batchers = {name: batcher for name, batcher in self._batchers.items() if name in replicas}
            self._batchers[replica] = self._batcher_for(replica)
            self._loads = {name: load for name, load in self._loads.items() if name in replicas}
        try:
            return await self._batchers[replica].call(request)
        except GenerationCut:
            raise
        except (GenerationLost, Overloaded, asyncio.CancelledError):
            # A cancelled call may have reached its timeout: the retry must not meet the same stuck engine.
            self._affinity.mark_failed(request.rollout_id)
            raise

    def release(self, rollout_id: str) -> None:
        self._affinity.release(rollout_id)

    async def describe(self) -> GeneratorDescription:
        response: Any = self._handle.describe.remote()
        description: GeneratorDescription = await call_result(response, response, GenerationLost, GENERATOR_REPLICA)
        return description

    def _batcher_for(self, replica: str | None) -> RequestBatcher[GenerationRequest, Generation]:
        named = self._handle.options(session_id=replica or "")
        start_call = named.options(stream=True).generate.remote
        return RequestBatcher(
            lambda requests: start_call(requests, self._caller),
            GenerationLost,
            GENERATOR_REPLICA,
            abort=partial(abort_generations, named),
            log_fields={"replica_id": replica},
            results_of=partial(self._results_of, replica),
            lost_after_heartbeats=LOST_AFTER_HEARTBEATS,
            bytes_of=bytes_of_generation_request,
        )

    def _results_of(self, replica: str | None, item: GenerationResults) -> BatchResults[Generation]:
        self._loads[replica] = item.load
        return item.results


def abort_generations(named: DeploymentHandle[Any], requests: list[GenerationRequest]) -> Any:
    return named.abort.remote([request.generation_id for request in requests])
