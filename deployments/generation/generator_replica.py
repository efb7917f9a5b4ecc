"""The generator deployment: one vLLM engine per Serve replica."""

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments import logs
from deployments.failures import GenerationLost
from deployments.generation.replica_seed import replica_seed
from deployments.generation.settings import EngineSettings
from deployments.policy.nodes.serve_sources import node_weights_of_replica
from deployments.policy.replicas.commands import LoadedWeights, ReplicaRegistration
from deployments.policy.store_client import PolicyStoreClient
from deployments.protocols import GenerationRequest, PrefixCacheTokens
from deployments.rpc.draining import call_at_shutdown
from deployments.rpc.generator_replica_base import GeneratorReplicaBase
from deployments.rpc.weight_demands import refuse_other_version

if TYPE_CHECKING:
    from deployments.generation.engine import VLLMEngine


class GeneratorReplica(GeneratorReplicaBase):
    """Ready when its engine is warm and has the current weights; unhealthy when it broke, and Serve replaces it."""

    _engine: "VLLMEngine"

    async def __init__(self, settings: EngineSettings, policy_store: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        # What vLLM prints stays in the log of Ray Serve.
        logs.configure(capture_output=False)
        os.environ.update(settings.environment_variables)
        from deployments.generation.command_runner import CommandRunner
        from deployments.generation.engine import VLLMEngine
        from deployments.generation.named_policies import NamedPolicies

        seed = replica_seed(settings.seed, replica_id())
        super().__init__(await VLLMEngine.start(settings.engine_args() | {"seed": seed}, settings.patch_deltas))
        store = PolicyStoreClient(policy_store)
        self._node_weights = node_weights_of_replica(store)
        await asyncio.to_thread(self._node_weights.join)
        named = NamedPolicies(
            self._engine.adapters,
            self._node_weights,
            self._engine.try_adapter,
            lambda: self._engine.weights.loaded.full,
        )
        self._commands = CommandRunner(
            self._engine.weights,
            self._engine.is_alive,
            store,
            partial(registration_of, settings.workers),
            self._node_weights,
            self._engine.generate_canary,
            named,
        )
        self._running_commands = asyncio.create_task(self._commands.run())
        is_current = asyncio.create_task(self._commands.is_current.wait())
        await asyncio.wait((self._running_commands, is_current), return_when=asyncio.FIRST_COMPLETED)
        await self.check_health()
        call_at_shutdown(self.drain)

    def refuse_other_weights(self, request: GenerationRequest) -> None:
        if self._commands.broken is not None:
            raise GenerationLost("The generator replica broke while its weights were changed; it is being replaced.")
        refuse_other_version(request, self._engine.version_of(request.policy))

    async def prefix_cache_tokens(self) -> PrefixCacheTokens:
        return self._engine.prefix_cache_tokens()

    async def read_weights(self, version: int, checksum: str, offset: int, count: int) -> bytes:
        """Documented in `NodeWeights.read`; counterpart of `ReplicaSource` (`deployments/policy/nodes`)."""
        return await self._node_weights.read(version, checksum, offset, count)

    async def check_health(self) -> None:
        """Raises what broke the engine, its outputs, or the task that runs the policy store's commands."""
        await super().check_health()
        if self._running_commands.done():
            self._running_commands.result()
            raise RuntimeError(f"An update of the weights broke the replica: {self._commands.broken}")
        await self._engine.check_health()

    def __del__(self) -> None:
        if engine := getattr(self, "_engine", None):
            engine.shutdown()
        if node_weights := getattr(self, "_node_weights", None):
            node_weights.leave()


def replica_id() -> str:
    """Of this replica; unique among all replicas, those that it replaces included."""
    unique_id: str = serve.get_replica_context().replica_id.unique_id
    return unique_id


def registration_of(workers: int, loaded: LoadedWeights) -> ReplicaRegistration:
    return ReplicaRegistration(replica_id(), ray.get_runtime_context().current_actor, workers, loaded)
