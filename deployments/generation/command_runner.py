"""Runs the policy store's commands on this replica; counterpart of `deployments/policy/replica_registry.py`.

Guarantees: commands run one after the other; the replica accepts requests only once it has the version that the store
calls current; a command that fails while it changes the weights leaves the replica broken, and it generates nothing any
more; a transfer that fails leaves the engine paused until full weights are swapped in; when the store restarts, the
replica registers again, except in the middle of a transfer: the new store knows nothing of it, and the replica breaks.

Adapters of named policies lie over the full weights, several at a time. A generation uses one only once it has passed
its canary here; the adapters of all names of a command are replaced at once, or not at all; nothing is paused.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deployments.failures import PolicyStoreLost
from deployments.generation.adapters import LoadedAdapter, adapter_folder
from deployments.generation.weights_canary import with_timeout
from deployments.policy.commands import (
    AbandonTransfer,
    AcceptRequests,
    ApplyTransfer,
    Canary,
    Command,
    CommandCosts,
    CommandReport,
    CommandSource,
    ComputeChecksum,
    FinishTransfer,
    Hold,
    InitTransfer,
    LoadedWeights,
    NumberedCommand,
    Release,
    ReplicaNotRegistered,
    ReplicaRegistration,
    SaveTransfer,
    SetAdapters,
    Stage,
    StartTransfer,
    StoredFile,
    Swap,
    UpdateTransfer,
    VersionPayload,
)
from deployments.policy.node_files import NodeFile, NodeWeights
from deployments.rpc.background_tasks import until_back
from rollout_client.contract.base import label_of

if TYPE_CHECKING:
    from deployments.generation.engine import VLLMEngine


class BaseReplaced(Exception):
    """The replica has other full weights than those that the adapter is for."""


_RETRY_AFTER_S = 0.5
_MOST_SHOWN = 400
"""Characters of an error's first line on the console."""
_TRANSFER_FILE = "transfer.safetensors"
"""In the replica's own folder, beside those of its adapters: what a trainer sent last."""
_CHANGES_WEIGHTS = Swap | AbandonTransfer | FinishTransfer
"""Commands that leave the replica in an unknown state when they fail."""
logger = logging.getLogger("rollout_service.generation")


def _first_line(failure: BaseException) -> str:
    """The failure's type and the first line of its message, which may hold another process's whole traceback."""
    text = next((line.strip() for line in str(failure).splitlines() if line.strip()), "")
    shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return f"{type(failure).__name__}: {shown}"


class _Done(NamedTuple):
    """The part of `CommandReport` that a command which succeeded fills in."""

    costs: CommandCosts = CommandCosts()
    saved: VersionPayload | None = None
    changes_nothing: bool = False


class CommandRunner:
    """Registers the replica with the store and runs the commands that the store gives it."""

    def __init__(
        self,
        engine: "VLLMEngine",
        store: CommandSource,
        registration_of: Callable[[LoadedWeights], ReplicaRegistration],
        node_weights: NodeWeights,
    ) -> None:
        self.is_current = asyncio.Event()
        """Set once the replica has the current version."""
        self.broken: str | None = None
        """Why the replica can generate nothing any more."""
        self._engine = engine
        self._adapters = engine.adapters
        self._weights = engine.weights
        self._store = store
        self._registration_of = registration_of
        self._node_weights = node_weights
        self._replica_id = ""
        """As it is registered."""
        self._checksum_task: asyncio.Task[None] | None = None
        self._swapped_at = 0.0
        self._keys: dict[int, str | None] = {}
        """By version, the key with which the store sent it last."""

    async def run(self) -> None:
        """Returns only when the replica is broken."""
        lost = (PolicyStoreLost, ReplicaNotRegistered)
        await until_back(
            self._run_for_one_store, lost, _RETRY_AFTER_S, self._break_in_transfer, goes_on=lambda: self.broken is None
        )

    def _break_in_transfer(self, lost: Exception, _is_first: bool) -> None:
        if self._weights.in_transfer:
            self._break(f"{type(lost).__name__} in the middle of a weight transfer: {lost}", lost)

    async def _run_for_one_store(self) -> None:
        loaded = self._weights.loaded
        keys = ((version, self._keys.get(version)) for version in (loaded.full, loaded.version) if version)
        registration = replace(
            self._registration_of(loaded),
            keys={version: key for version, key in keys if key is not None},
            is_on_trial=self._weights.is_on_trial,
            named=self._adapters.versions,
            held_s=self._weights.held_s,
        )
        self._replica_id = registration.replica_id
        await self._store.register(registration)
        report: CommandReport | None = None
        while self.broken is None:
            numbered = await self._store.next_command(self._replica_id, report)
            report = None if numbered is None else await self._run(numbered)
        # The store learns from the report that the replica is broken; a command that it answers with is not run.
        await self._store.next_command(self._replica_id, report)

    async def _run(self, numbered: NumberedCommand) -> CommandReport:
        error: str | None = None
        done = _Done()
        try:
            done = await self._carry_out(numbered.command)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            if isinstance(numbered.command, _CHANGES_WEIGHTS) or not await self._engine.is_alive():
                self._break(error, failure)
            else:
                name = type(numbered.command).__name__
                follows = "the engine waits for full weights" if self._weights.in_transfer else "generation goes on"
                # Warnings are shown on the console, and tracebacks of vLLM fill it: that is for the replica's log.
                logger.warning("The command %s failed, and %s: %s", name, follows, _first_line(failure))
                logger.info("The traceback of the command %s that failed:", name, exc_info=failure)
        is_broken = self.broken is not None
        return CommandReport(
            numbered.number, self._weights.loaded, error, is_broken, held_s=self._weights.held_s, **done._asdict()
        )

    async def _carry_out(self, command: Command) -> _Done:
        match command:
            case Stage(payload):
                self._keys[payload.version] = payload.key
                began = time.perf_counter()
                file = await self._stage(payload)
                load_s = time.perf_counter() - began
                return _Done(CommandCosts(load_s, fetched_bytes=file.fetched_bytes, read_bytes=file.read_bytes))
            case Swap(options, is_trial):
                self._stop_checksum()
                costs = await self._weights.swap(options, is_trial)
                self._swapped_at = time.perf_counter()
                return _Done(costs)
            case Canary(timeout_s):
                return _Done(changes_nothing=await with_timeout(self._engine.canary.try_current(), timeout_s))
            case SetAdapters():
                return await self._set_adapters(command)
            case AcceptRequests():
                waited_s = time.perf_counter() - self._swapped_at if self._weights.is_on_trial else 0.0
                self._weights.accept()
                self.is_current.set()
                return _Done(CommandCosts(canary_s=waited_s))
            case ComputeChecksum():
                self._start_checksum()
            case Hold(mode, lease_s):
                await self._weights.hold(mode, lease_s)
            case Release():
                await self._weights.release()
            case InitTransfer(init_info, timeout_s):
                await self._weights.init_transfer(dict(init_info), timeout_s)
            case StartTransfer(options, header):
                self._stop_checksum()
                await self._weights.start_transfer(options, self._node_weights.own_folder / _TRANSFER_FILE, header)
            case UpdateTransfer(update_info, silence_s):
                await self._weights.update_transfer(update_info, silence_s)
            case AbandonTransfer():
                await self._weights.abandon_transfer()
            case ApplyTransfer():
                await self._weights.apply_transfer()
            case FinishTransfer(version, key):
                self._keys[version] = key
                return _Done(await self._weights.finish_transfer(version))
            case SaveTransfer(version):
                checksum, size_bytes = await self._weights.saved_transfer()
                path = str(self._node_weights.own_folder / _TRANSFER_FILE)
                saved = StoredFile(path, self._node_weights.node_id, inode=0, modified_ns=0)
                return _Done(saved=VersionPayload(version, "full", size_bytes, checksum, saved))
        return _Done()

    async def _stage(self, payload: VersionPayload) -> NodeFile:
        """Returns what `CommandReport` says of the files that were needed."""
        if payload.kind == "adapter":
            folder, file = await self._adapter_folder(payload)
            await self._weights.stage_adapter(payload.version, folder)
        else:
            file = await self._node_weights.file_of(payload)
            await self._weights.stage(payload.version, file.path)
        return file

    async def _adapter_folder(self, payload: VersionPayload) -> tuple[Path, NodeFile]:
        """A folder with the adapter, and the file of which it was made."""
        # The same number may have had other weights before, which were refused.
        name = label_of(payload.name, payload.version).replace("/", "@")
        folder = self._node_weights.own_folder / f"{name}@{payload.checksum}"
        async with self._node_weights.file_to_copy(payload) as file:
            await asyncio.to_thread(adapter_folder, folder, payload, file.path, self._adapters.needed)
        return folder, file

    async def _set_adapters(self, command: SetAdapters) -> _Done:
        """
        Raises:
            BaseReplaced: an adapter is for other full weights.
            WeightsNotFetched, OSError: its file cannot be had.
            AdapterDoesNotFit: it is not for the model in the engine.
            GenerationNotFinite, GenerationLost: the engine cannot generate with it.
            Exception: what vLLM raises for an adapter that it cannot use.
        """
        began = time.perf_counter()
        fetched_bytes, changes_nothing = 0, False
        named: dict[str, LoadedAdapter] = {}
        for payload in command.payloads:
            if payload.base != (full := self._weights.loaded.full):
                raise BaseReplaced(f"It is an adapter for version {payload.base}, and the replica has version {full}.")
            label = label_of(payload.name, payload.version)
            adapter = self._adapters.held(label, payload.checksum)
            if adapter is None:
                folder, file = await self._adapter_folder(payload)
                adapter = await self._adapters.load(label, payload.version, folder, payload.checksum)
                # The canary needs the engine.
                await self._weights.release()
                changes_nothing |= await self._tried(adapter, command.canary_timeout_s)
                fetched_bytes += file.fetched_bytes
            named[str(payload.name)] = adapter
        if not command.is_trial:
            self._adapters.serve(named)
        costs = CommandCosts(time.perf_counter() - began, fetched_bytes=fetched_bytes)
        return _Done(costs, changes_nothing=changes_nothing)

    async def _tried(self, adapter: LoadedAdapter, canary_timeout_s: float) -> bool:
        """Holds the adapter if the engine can generate with it. Returns whether it changes no log-probability."""
        self._adapters.hold(adapter)
        try:
            return await with_timeout(self._engine.canary.try_adapter(adapter), canary_timeout_s)
        except BaseException:
            self._adapters.give_up(adapter)
            raise

    def _break(self, why: str, failure: Exception) -> None:
        """Marks the replica as broken, for the first reason."""
        if self.broken is None:
            self.broken = why
            logger.error("The replica broke and is replaced: %s", why, exc_info=failure)

    def _start_checksum(self) -> None:
        self._stop_checksum()
        # In the middle of a transfer the weights change: whoever waits asks again when it has ended.
        if not self._weights.in_transfer:
            self._checksum_task = asyncio.create_task(self._send_checksum(self._weights.loaded))

    def _stop_checksum(self) -> None:
        if self._checksum_task is not None:
            self._checksum_task.cancel()

    async def _send_checksum(self, loaded: LoadedWeights) -> None:
        checksum = await self._weights.checksum()
        try:
            await self._store.record_checksum(self._replica_id, loaded, checksum)
        except (PolicyStoreLost, ReplicaNotRegistered) as lost:
            # The replica registers again. Whoever waited asks the store again, and it the replica.
            logger.info("A checksum was computed for a store that is gone: %s", lost)
