"""The generator deployment of the scale model: the pace of an engine in place of one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import ray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.failures import GenerationLost, PolicyStoreLost
from deployments.policy.command_source import CommandSource, ReplicaNotRegistered
from deployments.policy.records import (
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
from deployments.simulation.simulated_engine import SimulatedEngine
from deployments.simulation.timing import Timing

NO_WEIGHTS = "This generator only keeps the pace of one and has no weights to change; push to a service with an engine."
REJOIN_AFTER_S = 0.5


class SimulatedEngineSettings(BaseModel):
    """What takes the place of an engine's settings where only its pace is wanted."""

    model_config = ConfigDict(extra="forbid")

    device: Literal["cpu"] = "cpu"
    model: str
    """A local path or a hub name; of it only the tokenizer is read."""
    tokenizer: str | None = None
    max_model_len: int = Field(ge=1)
    """Tokens."""
    num_cpus: float = Field(default=0.1, ge=0)
    """Cores that Ray sets aside for one replica."""
    pace: Timing

    @model_validator(mode="before")
    @classmethod
    def leaves_engine_args_alone(cls, settings: Any) -> Any:
        for name in settings.keys() - cls.model_fields.keys() if isinstance(settings, dict) else ():
            raise ValueError(f"{name} has no meaning beside pace, which takes the place of an engine: leave it out")
        return settings

    def ray_actor_options(self) -> dict[str, float]:
        return {"num_cpus": self.num_cpus}


class SimulatedGeneratorReplica:
    """Ready at once, at version 0 for ever; answers what `Generator` answers."""

    async def __init__(self, settings: SimulatedEngineSettings, policy_store: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._engine = SimulatedEngine.start(settings.pace, settings.model, settings.tokenizer, settings.max_model_len)
        self._calls = GenerationCalls(self._generate)
        registration = ReplicaRegistration(
            serve.get_replica_context().replica_id.unique_id,
            ray.get_runtime_context().current_actor,
            workers=1,
            loaded=LoadedWeights(),
        )
        self._refusing = asyncio.create_task(refuse_weights(PolicyStoreClient(policy_store), registration))

    async def generate(self, requests: list[GenerationRequest]) -> AsyncGenerator[BatchResults[Generation], None]:
        """As `Generator.generate`."""
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
        """Raises what ended the replica's answers to the policy store."""
        if self._refusing.done():
            self._refusing.result()


async def refuse_weights(store: CommandSource, registration: ReplicaRegistration) -> None:
    """Joins the registry, so that `/policy` shows the replica, and answers orders to change weights by a sentence."""
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
