"""A generator replica's side of the policy: joins the store and carries out its orders, one after the other.

Guarantees: a replica takes no call before it holds the version that the store calls current; an order that breaks the
engine midway leaves the replica broken, never serving; a store that died is joined again as soon as it is back, but not
by a replica that was in the middle of a transfer, of which the new store knows nothing: that one is broken.
"""

import asyncio
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deployments.failures import PolicyStoreLost
from deployments.generation.engine import SwapTimes, VLLMEngine
from deployments.policy.command_source import CommandSource, ReplicaNotRegistered
from deployments.policy.commands import (
    AcceptRequests,
    ApplyTransfer,
    Command,
    CommandReport,
    FinishTransfer,
    InitTransfer,
    LoadedWeights,
    NumberedCommand,
    ReplicaRegistration,
    Stage,
    StartTransfer,
    Swap,
    UpdateTransfer,
    VersionPayload,
)

REJOIN_AFTER_S = 0.5
BREAKS_THE_ENGINE = Swap | StartTransfer | UpdateTransfer | ApplyTransfer | FinishTransfer
"""What leaves the weights in no known state when it fails midway."""


NO_SWAP = SwapTimes()


@dataclass(frozen=True, slots=True)
class Times:
    load_s: float = 0.0
    swap: SwapTimes = NO_SWAP


class CommandRunner:
    """Args: `folder` is the replica's own, for weights on their way; `registration` is made anew for each joining."""

    def __init__(
        self,
        engine: VLLMEngine,
        store: CommandSource,
        registration: Callable[[LoadedWeights], ReplicaRegistration],
        folder: Path,
    ) -> None:
        self.is_current = asyncio.Event()
        self.broken: str | None = None
        self._engine = engine
        self._store = store
        self._registration = registration
        self._folder = folder
        self._digesting: asyncio.Task[None] | None = None
        self._is_receiving = False

    async def follow(self) -> None:
        """Runs for the replica's life; returns only when the replica is broken."""
        while self.broken is None:
            try:
                await self._follow_one_store()
            except (PolicyStoreLost, ReplicaNotRegistered) as lost:
                if self._is_receiving:
                    self.broken = self.broken or f"{type(lost).__name__} in the middle of a weight transfer: {lost}"
                await asyncio.sleep(REJOIN_AFTER_S)

    async def _follow_one_store(self) -> None:
        registration = self._registration(self._engine.loaded)
        await self._store.register(registration)
        self._begin_digest(registration.replica_id)
        report: CommandReport | None = None
        while self.broken is None or report is not None:
            numbered = await self._store.next_command(registration.replica_id, report)
            report = None if numbered is None else await self._report_of(numbered)
            if self.broken is None and numbered is not None and isinstance(numbered.command, Swap | FinishTransfer):
                self._begin_digest(registration.replica_id)

    async def _report_of(self, numbered: NumberedCommand) -> CommandReport:
        error: str | None = None
        times = Times()
        try:
            times = await self._carry_out(numbered.command)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the store decides what becomes of this replica
            error = f"{type(failure).__name__}: {failure}"
            if isinstance(numbered.command, BREAKS_THE_ENGINE) or not await self._engine.is_alive():
                self.broken = error
        report = CommandReport(numbered.number, self._engine.loaded, error, broken=self.broken is not None)
        return replace(report, load_s=times.load_s, swap_s=times.swap.swap_s, pause_s=times.swap.pause_s)

    async def _carry_out(self, command: Command) -> Times:
        match command:
            case Stage(payload):
                began = time.perf_counter()
                await self._stage(payload)
                return Times(time.perf_counter() - began)
            case Swap(options):
                self._stop_digest()
                return Times(swap=await self._engine.swap(options))
            case AcceptRequests():
                self.is_current.set()
            case InitTransfer(init_info):
                await self._engine.init_transfer(dict(init_info))
            case StartTransfer(options):
                self._is_receiving = True
                self._stop_digest()
                await self._engine.start_transfer(options)
            case UpdateTransfer(update_info):
                await self._engine.update_transfer(update_info)
            case ApplyTransfer():
                await self._engine.settle_transfer()
            case FinishTransfer(version):
                times = Times(swap=await self._engine.finish_transfer(version))
                self._is_receiving = False
                return times
        return Times()

    async def _stage(self, payload: VersionPayload) -> None:
        folder = self._folder / str(payload.version)
        await asyncio.to_thread(self._make_room, folder)
        path = folder / ("adapter_model.safetensors" if payload.kind == "adapter" else "model.safetensors")
        for piece in payload.chunks:
            await asyncio.to_thread(append, path, await piece)
        if payload.kind == "adapter":
            (folder / "adapter_config.json").write_text(payload.adapter_config or "{}")
            await self._engine.stage_adapter(payload.version, folder)
        else:
            await self._engine.stage(payload.version, path)

    def _make_room(self, folder: Path) -> None:
        """Removes what was fetched before, but for adapters that are in use."""
        in_use = {str(version) for version in self._engine.adapters_in_use}
        for earlier in self._folder.iterdir() if self._folder.is_dir() else ():
            if earlier.name not in in_use:
                shutil.rmtree(earlier)
        folder.mkdir(parents=True)

    def _stop_digest(self) -> None:
        if self._digesting is not None:
            self._digesting.cancel()

    def _begin_digest(self, replica_id: str) -> None:
        self._stop_digest()
        self._digesting = asyncio.create_task(self._digest(replica_id, self._engine.loaded))

    async def _digest(self, replica_id: str, loaded: LoadedWeights) -> None:
        checksum = await self._engine.weight_digest()
        try:
            await self._store.record_checksum(replica_id, loaded, checksum)
        except (PolicyStoreLost, ReplicaNotRegistered):
            return


def append(path: Path, piece: Any) -> None:
    with path.open("ab") as file:
        file.write(memoryview(piece))
