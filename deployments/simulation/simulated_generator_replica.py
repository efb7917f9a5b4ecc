"""The generator deployment without a model: one simulated engine per Serve replica."""

import asyncio
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments import logs
from deployments.failures import GenerationLost, PolicyStoreLost
from deployments.policy.replicas.command_source import CommandSource, ReplicaNotRegistered
from deployments.policy.replicas.commands import (
    AcceptRequests,
    CommandReport,
    LoadedWeights,
    NumberedCommand,
    ReplicaRegistration,
)
from deployments.policy.store_client import PolicyStoreClient
from deployments.rpc.draining import call_at_shutdown
from deployments.rpc.generator_replica_base import GeneratorReplicaBase
from deployments.simulation.settings import SimulatedEngineSettings
from deployments.simulation.simulated_engine import SimulatedEngine

NO_WEIGHTS = "This generator is simulated and has no weights to change; push to a service with an engine."
REGISTER_AGAIN_AFTER_S = 0.5


class SimulatedGeneratorReplica(GeneratorReplicaBase):
    """A generator replica with a `SimulatedEngine`: ready at once, its weights version 0 for its whole life."""

    async def __init__(self, settings: SimulatedEngineSettings, policy_store: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        logs.configure()
        super().__init__(
            SimulatedEngine.start(settings.simulated, settings.model, settings.tokenizer, settings.max_model_len)
        )
        registration = ReplicaRegistration(
            serve.get_replica_context().replica_id.unique_id,
            ray.get_runtime_context().current_actor,
            workers=1,
            loaded=LoadedWeights(),
        )
        call_at_shutdown(self.drain)
        self._refusing = asyncio.create_task(refuse_weights(PolicyStoreClient(policy_store), registration))

    def refuse_if_not_at(self, min_weight_version: int) -> None:
        if min_weight_version > 0:
            raise GenerationLost(f"The generator replica is not at version {min_weight_version}: {NO_WEIGHTS}")

    async def check_health(self) -> None:
        """Raises what ended the task that answers the policy store."""
        await super().check_health()
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
            await asyncio.sleep(REGISTER_AGAIN_AFTER_S)


def report_of(numbered: NumberedCommand) -> CommandReport:
    return CommandReport(
        numbered.number, LoadedWeights(), None if isinstance(numbered.command, AcceptRequests) else NO_WEIGHTS
    )
