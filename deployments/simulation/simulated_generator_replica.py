"""The generator deployment without a model: one simulated engine per Serve replica."""

import asyncio
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments import logs
from deployments.policy.replicas.commands import ReplicaRegistration
from deployments.policy.store_client import PolicyStoreClient
from deployments.protocols import GenerationRequest
from deployments.rpc.draining import call_at_shutdown
from deployments.rpc.generator_replica_base import GeneratorReplicaBase
from deployments.rpc.grpc_wakeups import read_all_wakeups
from deployments.rpc.weight_demands import refuse_other_version
from deployments.simulation.settings import SimulatedEngineSettings
from deployments.simulation.simulated_engine import SimulatedEngine
from deployments.simulation.simulated_weights import SimulatedWeights


class SimulatedGeneratorReplica(GeneratorReplicaBase):
    """A generator replica with a `SimulatedEngine`: ready at once, its weights nothing but the number of a version."""

    async def __init__(self, settings: SimulatedEngineSettings, policy_store: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        logs.configure()
        read_all_wakeups()
        engine = SimulatedEngine.start(settings.simulated, settings.model, settings.tokenizer, settings.max_model_len)
        super().__init__(engine)
        registration = ReplicaRegistration(
            serve.get_replica_context().replica_id.unique_id, ray.get_runtime_context().current_actor, workers=1
        )
        call_at_shutdown(self.drain)
        self._weights = SimulatedWeights(engine, PolicyStoreClient(policy_store), registration)
        self._running_commands = asyncio.create_task(self._weights.run())

    def refuse_other_weights(self, request: GenerationRequest) -> None:
        refuse_other_version(request, self._weights.version_of(request.policy))

    async def check_health(self) -> None:
        """Raises what ended the task that runs the policy store's commands."""
        await super().check_health()
        if self._running_commands.done():
            self._running_commands.result()
