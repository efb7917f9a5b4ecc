"""A replica of the generator without a model, for benchmarks and tests: one simulated engine per Serve replica.

A config names it as `engine.replica`, and how fast it is as `engine.simulated` (`Timing`).

A version of the weights is a number here, and its bytes are not read: `SimulatedWeights` is the counterpart of
`deployments/generation/command_runner.py`.
"""

import asyncio
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from benchmarks.simulation.simulated_engine import SimulatedEngine
from benchmarks.simulation.timing import Timing
from deployments import logs
from deployments.failures import PolicyStoreLost
from deployments.generation.generator_replica_base import GeneratorReplicaBase
from deployments.generation.settings import EngineSettings
from deployments.policy.commands import (
    AcceptRequests,
    Canary,
    Command,
    CommandReport,
    CommandSource,
    ComputeChecksum,
    LoadedWeights,
    NumberedCommand,
    ReplicaNotRegistered,
    ReplicaRegistration,
    SetAdapters,
    Stage,
    Swap,
    VersionPayload,
)
from deployments.protocols.generation import GenerationRequest
from deployments.protocols.weight_versions import refuse_other_version
from deployments.rpc.background_tasks import until_back
from deployments.rpc.handle_calls import policy_store_client
from deployments.upstream.ray_serve.own_replica import call_at_shutdown, install

NO_WEIGHTS = "This generator is simulated and has no weights that a trainer could transfer into its memory: push them."
REGISTER_AGAIN_AFTER_S = 0.5


class SimulatedWeights:
    """Registers the replica with the store, and changes the engine's version as the store commands."""

    def __init__(
        self, engine: SimulatedEngine, store: CommandSource, registration: ReplicaRegistration, timing: Timing
    ) -> None:
        self._timing = timing
        self.loaded = LoadedWeights()
        self._engine = engine
        self._store = store
        self._registration = registration
        self._staged: VersionPayload | None = None
        self._keys: dict[int, str] = {}

    def version_of(self, policy: str | None) -> int | None:
        """The version that new generations of this policy use; `None` if there is none."""
        return self.loaded.version if policy is None else self._engine.named.get(policy)

    async def run(self) -> None:
        await until_back(self._run_for_one_store, (PolicyStoreLost, ReplicaNotRegistered), REGISTER_AGAIN_AFTER_S)

    async def _run_for_one_store(self) -> None:
        held = (self.loaded.full, self.loaded.adapter)
        keys = {version: key for version, key in self._keys.items() if version in held}
        named = self._engine.named
        await self._store.register(replace(self._registration, loaded=self.loaded, keys=keys, named=named))
        report: CommandReport | None = None
        while True:
            numbered = await self._store.next_command(self._registration.replica_id, report)
            report = None if numbered is None else await self._run(numbered)

    async def _run(self, numbered: NumberedCommand) -> CommandReport:
        error = await self._carry_out(numbered.command)
        return CommandReport(numbered.number, self.loaded, error)

    async def _carry_out(self, command: Command) -> str | None:
        """Returns why the command fails, if it does."""
        match command:
            case Stage(payload):
                await asyncio.sleep(self._timing.stage_s)
                self._staged = payload
                if payload.key is not None:
                    self._keys[payload.version] = payload.key
            case Swap(options):
                assert self._staged is not None
                version = self._staged.version
                is_adapter = self._staged.kind == "adapter"
                await self._engine.pause(0.0 if is_adapter else self._timing.swap_s)
                self.loaded = LoadedWeights(self.loaded.full, version) if is_adapter else LoadedWeights(version)
                # Generations keep the adapter with which they began.
                await self._engine.change_version(version, "wait" if is_adapter else options.mode)
                if not is_adapter:
                    self._engine.named = {}
            case SetAdapters(payloads, _, is_trial):
                if not is_trial:
                    self._engine.named = {str(payload.name): payload.version for payload in payloads}
            case Canary() | AcceptRequests() | ComputeChecksum():
                # There are no weights to compute a checksum of: it stays unknown.
                pass
            case _:
                return NO_WEIGHTS
        return None


class SimulatedGeneratorReplica(GeneratorReplicaBase):
    """A generator replica with a `SimulatedEngine`: ready at once, its weights nothing but the number of a version."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: EngineSettings, policy_store: DeploymentHandle[Any], *_: object
    ) -> None:
        logs.configure()
        install()
        timing = Timing.model_validate((settings.model_extra or {}).get("simulated", {}))
        assert isinstance(settings.max_model_len, int)
        engine = SimulatedEngine.start(timing, settings.model, settings.tokenizer, settings.max_model_len)
        super().__init__(engine)
        registration = ReplicaRegistration(
            serve.get_replica_context().replica_id.unique_id, ray.get_runtime_context().current_actor, workers=1
        )
        call_at_shutdown(self.drain)
        self._weights = SimulatedWeights(engine, policy_store_client(policy_store), registration, timing)
        self._running_commands = asyncio.create_task(self._weights.run())

    def refuse_other_weights(self, request: GenerationRequest) -> None:
        refuse_other_version(request, self._weights.version_of(request.policy))

    async def check_health(self) -> None:
        """Raises what ended the task that runs the policy store's commands."""
        await super().check_health()
        if self._running_commands.done():
            self._running_commands.result()
