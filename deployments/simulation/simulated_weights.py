"""Runs the policy store's commands on a simulated replica: a version is a number there, and its bytes are not read.

The counterpart of `deployments/generation/command_runner.py`.
"""

import asyncio
from dataclasses import replace

from deployments.failures import PolicyStoreLost
from deployments.policy.replicas.command_source import CommandSource, ReplicaNotRegistered
from deployments.policy.replicas.commands import (
    AcceptRequests,
    Canary,
    Command,
    CommandReport,
    ComputeChecksum,
    LoadedWeights,
    NumberedCommand,
    ReplicaRegistration,
    SetAdapters,
    Stage,
    Swap,
    VersionPayload,
)
from deployments.simulation.simulated_engine import SimulatedEngine

NO_WEIGHTS = "This generator is simulated and has no weights that a trainer could transfer into its memory: push them."
REGISTER_AGAIN_AFTER_S = 0.5


class SimulatedWeights:
    """Registers the replica with the store, and changes the engine's version as the store commands."""

    def __init__(self, engine: SimulatedEngine, store: CommandSource, registration: ReplicaRegistration) -> None:
        self.loaded = LoadedWeights()
        self._engine = engine
        self._store = store
        self._registration = registration
        self._staged: VersionPayload | None = None
        self._records: dict[int, str] = {}

    def version_of(self, policy: str | None) -> int | None:
        """The version that new generations of this policy use; `None` if there is none."""
        return self.loaded.version if policy is None else self._engine.named.get(policy)

    async def run(self) -> None:
        while True:
            try:
                await self._run_for_one_store()
            except (PolicyStoreLost, ReplicaNotRegistered):
                await asyncio.sleep(REGISTER_AGAIN_AFTER_S)

    async def _run_for_one_store(self) -> None:
        held = (self.loaded.full, self.loaded.adapter)
        records = {version: record for version, record in self._records.items() if version in held}
        named = self._engine.named
        await self._store.register(replace(self._registration, loaded=self.loaded, records=records, named=named))
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
                self._staged = payload
                if payload.record is not None:
                    self._records[payload.version] = payload.record
            case Swap(options):
                assert self._staged is not None
                version = self._staged.version
                is_adapter = self._staged.kind == "adapter"
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
