"""The `Generator` port over Serve handles. Server half: `deployments/rpc/generator_replica_base.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from ray.serve.handle import DeploymentHandle

from deployments.failures import GenerationLost, Overloaded
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
from service.remote.batching import ControlCalls, RequestBatcher
from service.remote.replica_affinity import ReplicaAffinity

GENERATOR_REPLICA = "The generator replica"
LOST_AFTER_HEARTBEATS = 10
"""A replica's event loop can stall for seconds, while it reads weights or compiles; a hung one stalls for ever."""


@dataclass(frozen=True, slots=True)
class ReplicaCalls:
    """The calls of one replica."""

    generate: RequestBatcher[GenerationRequest, Generation]
    interrupt: ControlCalls[GenerationRequest]


class RemoteGenerator(Generator):
    """Sends each generation to the replica that has the rollout's prefix cached, batched with others for it."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._affinity = ReplicaAffinity()
        self._calls: dict[str | None, ReplicaCalls] = {}
        """By replica; `None` for requests that were made before any replica was known."""
        self._running: dict[str, tuple[ReplicaCalls, GenerationRequest]] = {}
        """By rollout."""
        self._caller = uuid4().hex
        self._loads: dict[str | None, ReplicaLoad] = {}
        """What each replica said last."""

    async def generate(self, request: GenerationRequest) -> Generation:
        replicas = live_replicas_of(self._handle)
        replica = self._affinity.replica_for(request.rollout_id, request.group, replicas)
        if replica not in self._calls:
            self._calls = {name: calls for name, calls in self._calls.items() if name in replicas}
            self._calls[replica] = self._calls_of(replica)
            self._loads = {name: load for name, load in self._loads.items() if name in replicas}
        calls = self._calls[replica]
        self._running[request.rollout_id] = calls, request
        try:
            generation = await calls.generate.call(request)
        except (GenerationLost, Overloaded):
            self._affinity.mark_failed(request.rollout_id)
            raise
        finally:
            del self._running[request.rollout_id]
        if generation.failure is not None:
            self._affinity.mark_failed(request.rollout_id)
        return generation

    def interrupt(self, rollout_id: str) -> bool:
        if rollout_id not in self._running:
            return False
        calls, request = self._running[rollout_id]
        calls.interrupt.add(request)
        return True

    def release(self, rollout_id: str) -> None:
        self._affinity.release(rollout_id)

    async def describe(self) -> GeneratorDescription:
        response: Any = self._handle.describe.remote()
        description: GeneratorDescription = await call_result(response, response, GenerationLost, GENERATOR_REPLICA)
        return description

    def _calls_of(self, replica: str | None) -> ReplicaCalls:
        named = self._handle.options(session_id=replica or "")
        log_fields = {"replica_id": replica}
        start_call = named.options(stream=True).generate.remote

        def control(call: Callable[[list[str]], Any], done: str) -> ControlCalls[GenerationRequest]:
            return ControlCalls(
                lambda requests: call([request.generation_id for request in requests]),
                done,
                GenerationLost,
                GENERATOR_REPLICA,
                log_fields,
            )

        return ReplicaCalls(
            RequestBatcher(
                lambda requests: start_call(requests, self._caller),
                GenerationLost,
                GENERATOR_REPLICA,
                abort=control(named.abort.remote, "aborted"),
                log_fields=log_fields,
                results_of=partial(self._results_of, replica),
                lost_after_heartbeats=LOST_AFTER_HEARTBEATS,
                bytes_of=bytes_of_generation_request,
            ),
            control(named.interrupt.remote, "interrupted"),
        )

    def _results_of(self, replica: str | None, item: GenerationResults) -> BatchResults[Generation]:
        self._loads[replica] = item.load
        return item.results
