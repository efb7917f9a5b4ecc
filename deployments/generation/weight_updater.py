"""Changes the weights of one running vLLM engine: staged files, LoRA adapters, and transfers from a trainer.

The workers' half is `deployments/generation/worker_extension.py`.
"""

import asyncio
import hashlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.generation.adapters import Adapters, LoadedAdapter
from deployments.generation.trainer_transfer import Written
from deployments.policy.commands import CommandCosts, LoadedWeights, SwapOptions
from deployments.upstream.vllm.weight_transfer import pause_scheduler
from rollout_client.contract.policy import PauseMode

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger("rollout_service.generation")
INITIAL_VERSION = 0
_STAGING_POLL_S = 0.005
_RENDEZVOUS_POLL_S = 0.05
_NOT_ASKED = "the transfer was begun without a file"
_CHECKSUM_STEP_S = 0.004
_CHECKSUM_PAUSE_S = 0.02
"""A checksum takes this time of the workers in steps of `_CHECKSUM_STEP_S`, with this pause between two."""
_DROPS_BLOCKS = "OffloadingConnector"
"""The connector of `kv_offloading_size`, which a reset of the cache empties. vLLM ignores that others stay full."""


class WeightsFailed(Exception):
    """The weights could not be read, put in place, received or saved, or the trainer could not be reached."""


class WeightUpdater:
    """One update at a time; the caller does not start another before the last one has ended."""

    def __init__(self, llm: "AsyncLLM", adapters: Adapters) -> None:
        self._llm = llm
        self._adapters = adapters
        self._staged: tuple[int, LoadedAdapter | None] | None = None
        """The version, and its adapter; `None` for full weights."""
        self._paused_at = 0.0
        self.in_transfer = False
        """Whether the weights may be of two versions: full ones have to be swapped in, or the transfer finished."""
        self.is_paused = False
        """Whether the engine generates nothing until an update has ended."""
        self.is_held = False
        """Whether the engine generates nothing because of `hold` alone."""
        self._hold_ends_at = 0.0
        """By the clock of the event loop."""
        self._hold_end: asyncio.Task[None] | None = None
        """Ends the hold then."""
        self.loaded = LoadedWeights(INITIAL_VERSION)
        self.may_generate = asyncio.Event()
        """Cleared while new generations have to wait for the end of an update."""
        self.may_generate.set()
        self.aborts = 0
        """How many updates have aborted ongoing generations."""
        self.swaps = 0
        """How often other full weights took the place of those that were loaded."""
        self.is_on_trial = False
        """Whether generations wait until it is known that the weights can be used."""

    def version_of(self, policy: str | None) -> int | None:
        """The version that new generations of this policy use; `None` if there is none."""
        return self.loaded.version if policy is None else self._adapters.versions.get(policy)

    async def stage(self, version: int, path: Path) -> None:
        """Reads the safetensors file at `path` into the workers' memory; generations go on.

        Raises:
            WeightsFailed: the file cannot be read, or the engine would read the cache of the old weights.
        """
        self._refuse_lasting_blocks()
        await self._llm.collective_rpc("begin_staging", args=(str(path),))
        while not all(await self._call_workers("staged")):
            await asyncio.sleep(_STAGING_POLL_S)
        self._staged = version, None

    async def stage_adapter(self, version: int, folder: Path) -> None:
        """Loads the LoRA adapter in `folder`, which must be kept as long as `Adapters.needed` names it.

        Raises:
            Exception: what vLLM raises for an adapter that it cannot use.
        """
        self._staged = version, await self._adapters.load(str(version), version, folder)

    def accept(self) -> None:
        """Ends a trial, if there is one: generations go on."""
        self.is_on_trial = False
        self.may_generate.set()

    async def hold(self, mode: PauseMode, lease_s: float) -> None:
        """Pauses the engine until `release`, the next change of weights or adapters, or the end of the lease.

        Raises:
            WeightsFailed: an update keeps the engine paused, or generations of "wait" did not end within the lease.
        """
        if self.is_paused:
            raise WeightsFailed("an update that did not end keeps the engine paused")
        self._hold_ends_at = ends_at = asyncio.get_running_loop().time() + lease_s
        self._forget_hold()
        self.aborts += mode == "abort"
        try:
            async with asyncio.timeout_at(ends_at):
                await pause_scheduler(self._llm, mode, clear_cache=False)
            self.is_held = True
        except TimeoutError as error:
            raise WeightsFailed(f"generations had not ended after {lease_s:g} s") from error
        finally:
            if not self.is_held:
                await self._llm.resume_generation()
        self._hold_end = asyncio.create_task(self._release_at(ends_at))

    @property
    def held_s(self) -> float:
        """How much longer a hold lasts, if nothing ends it."""
        return max(self._hold_ends_at - asyncio.get_running_loop().time(), 0.0) if self.is_held else 0.0

    async def _release_at(self, ends_at: float) -> None:
        await asyncio.sleep(ends_at - asyncio.get_running_loop().time())
        self._hold_end = None
        logger.warning("Generations go on: nobody has ended the pause within its lease.")
        await self.release()

    async def release(self) -> None:
        """Ends a hold, if there is one: generations go on."""
        if self.is_held:
            self._forget_hold()
            await self._llm.resume_generation()

    def _forget_hold(self) -> None:
        """The engine stays paused: whoever calls this pauses it for longer, or resumes."""
        self.is_held = False
        if self._hold_end is not None:
            self._hold_end.cancel()
            self._hold_end = None

    async def swap(self, options: SwapOptions, is_trial: bool = False) -> CommandCosts:
        """Changes to the staged weights. A switch of adapter pauses nothing: ongoing generations keep the old one.

        In a trial no generation uses the new weights before `accept`. Those that `options` freezes are interrupted
        after the swap, because the engine can run nothing else while it holds them; they go on after the trial.

        Raises:
            WeightsFailed: it failed. The engine stays paused: its weights may be a mixture of two versions.
        """
        if self._staged is None:
            raise RuntimeError("Nothing is staged.")
        version, adapter = self._staged
        if adapter is not None and self.in_transfer:
            raise RuntimeError("A transfer broke off: full weights have to be loaded before an adapter.")
        self.is_on_trial = is_trial
        if is_trial:
            self.may_generate.clear()
        costs = CommandCosts()
        if adapter is not None:
            await self.release()
            self._adapters.switch_to(adapter)
            self.loaded = LoadedWeights(self.loaded.full, version)
            self._staged = None
        else:
            await self._pause(options, is_trial)
            seconds = await self._call_workers("swap_staged")
            costs = CommandCosts(swap_s=max(seconds), pause_s=await self._resume(version, is_trial))
        if not is_trial:
            self.accept()
        return costs

    async def init_transfer(self, init_info: dict[str, Any], timeout_s: float) -> None:
        """Connects to the trainer by the backend of `weight_transfer_config`, while generations go on.

        Raises:
            WeightsFailed: a worker could not, or not within `timeout_s` seconds, or the engine would read the cache of
                the old weights. None is connected then.
        """
        self._refuse_lasting_blocks()
        deadline = time.monotonic() + timeout_s
        is_met = False
        try:
            await self._call_workers("begin_rendezvous", init_info)
            while not is_met and time.monotonic() < deadline:
                await asyncio.sleep(_RENDEZVOUS_POLL_S)
                is_met = all(await self._call_workers("rendezvous_state"))
        finally:
            waited_for = await self._llm.collective_rpc("end_rendezvous", args=(is_met,))
        if not is_met:
            reason = next(filter(None, waited_for), "a worker was slow")
            raise WeightsFailed(f"{timeout_s:g} s were not enough: {reason}")

    async def start_transfer(self, options: SwapOptions, file: Path, header: bytes | None = None) -> None:
        """Pauses the engine and prepares it for the weights that the trainer sends.

        Args:
            header: one worker writes them to `file` too, a safetensors file that begins so; with `None` no worker.
        """
        self.in_transfer = True
        await self._llm.collective_rpc("begin_saving", args=(str(file), header))
        await self._pause(options)
        await self._llm.start_weight_update()

    async def update_transfer(self, update_info: Any, silence_s: float) -> None:
        """Receives the weights that `update_info` announces.

        Raises:
            WeightsFailed: a worker failed, or nothing arrived for `silence_s` seconds. The engine stays paused.
        """
        await self._call_workers("receive_transfer", update_info, silence_s)

    async def saved_transfer(self) -> Written:
        """Waits until all of the last transfer was written to its file.

        Raises:
            WeightsFailed: it could not be.
        """
        while True:
            of_workers: list[tuple[Written | None, str | None] | None] = await self._llm.collective_rpc("saved_weights")
            written, error = next(filter(None, of_workers), (None, _NOT_ASKED))
            if error is not None:
                raise WeightsFailed(error)
            if written is not None:
                return written
            await asyncio.sleep(_STAGING_POLL_S)

    async def abandon_transfer(self) -> None:
        """Lets go of a trainer whose transfer broke off. The engine stays paused until full weights are swapped in."""
        await self._call_workers("abandon_transfer")

    async def apply_transfer(self) -> None:
        """Puts the received weights in place; the engine stays paused."""
        await self._llm.finish_weight_update()

    async def finish_transfer(self, version: int) -> CommandCosts:
        """Labels the weights `version` and resumes. Swap and pause are the whole time since `start_transfer`."""
        await self._llm.collective_rpc("end_transfer")
        pause_s = await self._resume(version)
        self.accept()
        return CommandCosts(swap_s=pause_s, pause_s=pause_s)

    async def checksum(self) -> str:
        """A sha-256 over the weights in the workers' memory, computed in small steps between those of the engine."""
        while True:
            checksums = await self._llm.collective_rpc("checksum_weights", args=(_CHECKSUM_STEP_S,))
            if all(checksums):
                [first, *others] = checksums
                return hashlib.sha256("".join(checksums).encode()).hexdigest() if others else str(first)
            await asyncio.sleep(_CHECKSUM_PAUSE_S)

    def _refuse_lasting_blocks(self) -> None:
        if (transfer := self._llm.vllm_config.kv_transfer_config) is None:
            return
        if transfer.kv_connector != _DROPS_BLOCKS or transfer.kv_connector_extra_config.get("secondary_tiers"):
            raise WeightsFailed(
                f"engine.kv_transfer_config: {transfer.kv_connector} may keep blocks of older weights, and the engine "
                "would read them. To push weights, offload with kv_offloading_size alone"
            )

    async def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """The result of each worker, which returns it with an error. Raises `WeightsFailed` if one has an error."""
        results: list[tuple[Any, str | None]] = await self._llm.collective_rpc(method, args=arguments)
        for worker, (_, error) in enumerate(results):
            if error is not None:
                raise WeightsFailed(f"Worker {worker}: {error}")
        return [result for result, _ in results]

    async def _pause(self, options: SwapOptions, is_trial: bool = False) -> None:
        self._forget_hold()
        mode = options.mode
        if self._adapters.current is not None or self._adapters.versions:
            # Adapters belong to the old weights: no token may be generated with one on top of the new ones.
            self.may_generate.clear()
            mode = "abort" if mode == "keep" else mode
        elif mode == "keep" and options.reset_prefix_cache and self._llm.vllm_config.kv_transfer_config is not None:
            # vLLM fails to reset the cache while a frozen request holds blocks that it loads from host memory.
            mode = "abort"
        self.aborts += is_trial or mode == "abort"
        await pause_scheduler(self._llm, mode, options.reset_prefix_cache)
        if not options.reset_prefix_cache:
            # What the old weights saw of images is dropped by a swap in the worker alone: vLLM's scheduler would go on
            # counting on it, and the engine die at the next prompt with such an image.
            await self._llm.reset_encoder_cache()
        self._paused_at = time.perf_counter()
        self.is_paused = True

    async def _resume(self, version: int, is_trial: bool = False) -> float:
        """Labels the weights `version` and resumes; a trial interrupts all generations. Returns the pause's seconds.

        The generations of a trial are interrupted so late because hundreds of them, which begin again, take the
        processors from the swap. The pause of a trial ends with the label.
        """
        await self._llm.update_weight_version(str(version))
        pause_s = time.perf_counter() - self._paused_at
        if is_trial:
            # Those that wait in the engine's queue are interrupted too: the engine has to be empty.
            await pause_scheduler(self._llm, "abort", clear_cache=False)
        await self._llm.resume_generation()
        if not is_trial:
            pause_s = time.perf_counter() - self._paused_at
        self.is_paused = self.in_transfer = False
        self.loaded = LoadedWeights(version)
        self._staged = None
        self.swaps += 1
        self._adapters.switch_to(None)
        self._adapters.serve({})
        return pause_s
