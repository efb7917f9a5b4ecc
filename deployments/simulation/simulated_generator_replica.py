"""The generator deployment without a model: one simulated engine per Serve replica."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.failures import GenerationLost, PolicyStoreLost
from deployments.policy.command_source import CommandSource, ReplicaNotRegistered
from deployments.policy.commands import (
    AcceptRequests,
    CommandReport,
    LoadedWeights,
    NumberedCommand,
    ReplicaRegistration,
)
from deployments.policy.store_client import PolicyStoreClient
from deployments.protocols import Generation, GenerationRequest, GeneratorDescription
from deployments.rpc.autoscaling import stats_of
from deployments.rpc.batching import BatchResults
from deployments.rpc.generation_calls import GenerationCalls
from deployments.simulation.settings import SimulatedEngineSettings
from deployments.simulation.simulated_engine import SimulatedEngine

NO_WEIGHTS = "This generator is simulated and has no weights to change; push to a service with an engine."
REJOIN_AFTER_S = 0.5


class SimulatedGeneratorReplica:
    """Has the methods of `GeneratorReplica`. It is ready at once and its weights are version 0 for its whole life."""

    async def __init__(self, settings: SimulatedEngineSettings, policy_store: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._engine = SimulatedEngine.start(
            settings.simulated, settings.model, settings.tokenizer, settings.max_model_len
        )
        self._calls = GenerationCalls(self._generate)
        registration = ReplicaRegistration(
            serve.get_replica_context().replica_id.unique_id,
            ray.get_runtime_context().current_actor,
            workers=1,
            loaded=LoadedWeights(),
        )
        self._refusing = asyncio.create_task(refuse_weights(PolicyStoreClient(policy_store), registration))

    async def generate(self, requests: list[GenerationRequest]) -> AsyncGenerator[BatchResults[Generation], None]:
        """As `GeneratorReplica.generate`."""
        async with aclosing(self._calls.answers(requests)) as finished:
            async for answers in finished:
                yield answers

    async def abort(self, request_ids: list[str]) -> None:
        self._calls.abort(request_ids)

    async def _generate(self, request: GenerationRequest) -> Generation:
        if request.min_weight_version > 0:
            raise GenerationLost(f"The generator replica is not at version {request.min_weight_version}: {NO_WEIGHTS}")
        return await self._engine.generate(request)

    async def describe(self) -> GeneratorDescription:
        return self._engine.describe()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return stats_of(self._engine.ongoing_generations)

    async def check_health(self) -> None:
        """Raises what ended the task that answers the policy store."""
        if self._refusing.done():
            self._refusing.result()


async def refuse_weights(store: CommandSource, registration: ReplicaRegistration) -> None:
    """Registers the replica, so that `/policy` shows it, and answers each command that it has no weights."""
    while True:
        try:
            await store.register(registration)
            report: CommandReport | None = None
            while True:
                numbered = await store.next_command(registration.replica_id, report)
                report = None if numbered is None else report_of(numbered)
        except (PolicyStoreLost, ReplicaNotRegistered):
            await asyncio.sleep(REJOIN_AFTER_S)


def report_of(numbered: NumberedCommand) -> CommandReport:
    return CommandReport(
        numbered.number, LoadedWeights(), None if isinstance(numbered.command, AcceptRequests) else NO_WEIGHTS
    )
