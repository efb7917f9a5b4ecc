"""Changes the weights of one running vLLM engine: staged files, LoRA adapters, and transfers from a trainer.

The workers' half is `deployments/generation/worker_extension.py`.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.generation.adapters import Adapters, LoadedAdapter
from deployments.generation.trainer_transfer import Written
from deployments.policy.commands import CommandCosts, LoadedWeights, SwapOptions
from deployments.upstream.vllm.weight_transfer import pause_scheduler

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

INITIAL_VERSION = 0
STAGING_POLL_S = 0.005
RENDEZVOUS_POLL_S = 0.05
NOT_ASKED = "the transfer was begun without a file"
CHECKSUM_STEP_S = 0.004
CHECKSUM_PAUSE_S = 0.02
"""A checksum takes at most CHECKSUM_STEP_S of every CHECKSUM_STEP_S + CHECKSUM_PAUSE_S seconds of the workers' time."""


class WeightsNotLoaded(Exception):
    """A worker could not read the new weights, or could not put them in place."""


class WeightsNotSaved(Exception):
    """Transferred weights could not be written to a file."""


class TransferBroken(Exception):
    """A worker did not receive what the trainer should have sent."""


class TrainerNotMet(Exception):
    """A worker could not connect to the trainer of a weight transfer."""


class WeightUpdater:
    """One update at a time; the caller does not start another before the last one has ended."""

    def __init__(
        self,
        llm: "AsyncLLM",
        adapters: Adapters,
        ongoing_tokens: Callable[[], int] = lambda: 0,
    ) -> None:
        """`ongoing_tokens` counts the tokens of the generations under way, prompts included."""
        self._llm = llm
        self._ongoing_tokens = ongoing_tokens
        self._recomputed_tokens = 0
        """Tokens recomputed after the last pause."""
        self._adapters = adapters
        self._staged: tuple[int, LoadedAdapter | None] | None = None
        """The version, and its adapter; `None` for full weights."""
        self._paused_at = 0.0
        self._in_transfer = False
        """Whether the weights may be of two versions: full ones have to be swapped in, or the transfer finished."""
        self.is_paused = False
        """Whether the engine generates nothing until an update has ended."""
        self.loaded = LoadedWeights(INITIAL_VERSION)
        self.may_generate = asyncio.Event()
        """Cleared while new generations have to wait for the end of an update."""
        self.may_generate.set()
        self.aborts = 0
        """How many updates have aborted ongoing generations."""
        self.swaps = 0
        """How often other full weights took the place of those that were loaded."""
        self._on_trial_since: float | None = None
        """When the swap of a trial ended; `None` outside of trials."""

    def version_of(self, policy: str | None) -> int | None:
        """The version that new generations of this policy use; `None` if there is none."""
        return self.loaded.version if policy is None else self._adapters.versions.get(policy)

    @property
    def needed_adapters(self) -> set[str]:
        """Names of the folders of adapters that must be kept."""
        return self._adapters.needed

    async def stage(self, version: int, path: Path) -> None:
        """Reads the safetensors file at `path` into the workers' memory; generations go on.

        Raises:
            WeightsNotLoaded: the file cannot be read.
        """
        await self._llm.collective_rpc("begin_staging", args=(str(path),))
        while not all(await self._call_workers("staged")):
            await asyncio.sleep(STAGING_POLL_S)
        self._staged = version, None

    async def stage_adapter(self, version: int, folder: Path) -> None:
        """Loads the LoRA adapter in `folder`, which must be kept as long as `needed_adapters` names it.

        Raises:
            Exception: what vLLM raises for an adapter that it cannot use.
        """
        self._staged = version, await self._adapters.load(str(version), version, folder)

    @property
    def stages_other_full_weights(self) -> bool:
        """Whether full weights are staged, and the engine generates with others."""
        return self._staged is not None and self._staged[1] is None and not self.is_paused

    @property
    def is_on_trial(self) -> bool:
        """Whether generations wait until it is known that the weights can be used."""
        return self._on_trial_since is not None

    def accept(self) -> float:
        """Ends a trial, if there is one: generations go on. Returns how many seconds they have waited for its end."""
        since, self._on_trial_since = self._on_trial_since, None
        self.may_generate.set()
        return 0.0 if since is None else time.perf_counter() - since

    async def swap(self, options: SwapOptions, is_trial: bool = False) -> CommandCosts:
        """Changes to the staged weights. A switch of adapter pauses nothing: ongoing generations keep the old one.

        In a trial no generation uses the new weights before `accept`. Those that `options` freezes are interrupted
        after the swap, because the engine can run nothing else while it holds them; they go on after the trial.

        Raises:
            WeightsNotLoaded: it failed, and the engine generates no token any more.
        """
        if self._staged is None:
            raise RuntimeError("Nothing is staged.")
        version, adapter = self._staged
        if adapter is not None and self._in_transfer:
            raise RuntimeError("A transfer broke off: full weights have to be loaded before an adapter.")
        if is_trial:
            self._on_trial_since = time.perf_counter()
            self.may_generate.clear()
        if adapter is not None:
            self._adapters.switch_to(adapter)
            self.loaded = LoadedWeights(self.loaded.full, version)
            self._staged = None
            swapped_at, costs = time.perf_counter(), CommandCosts()
        else:
            await self._pause(options, is_trial)
            seconds, pause_s = await self._resume(version, self._call_workers("swap_staged"), is_trial)
            swapped_at, costs = self._paused_at + pause_s, self._costs_of_pause(max(seconds), pause_s)
        if is_trial:
            self._on_trial_since = swapped_at
        else:
            self.accept()
        return costs

    async def init_transfer(self, init_info: dict[str, Any], timeout_s: float) -> None:
        """Connects to the trainer by the backend of `weight_transfer_config`, while generations go on.

        Raises:
            TrainerNotMet: a worker could not, or not within `timeout_s` seconds. None is connected then.
        """
        deadline = time.monotonic() + timeout_s
        is_met = False
        try:
            await self._call_workers("begin_rendezvous", init_info, failure=TrainerNotMet)
            while not is_met and time.monotonic() < deadline:
                await asyncio.sleep(RENDEZVOUS_POLL_S)
                is_met = all(await self._call_workers("rendezvous_state", failure=TrainerNotMet))
        finally:
            waited_for = await self._llm.collective_rpc("end_rendezvous", args=(is_met,))
        if not is_met:
            reason = next(filter(None, waited_for), "a worker was slow")
            raise TrainerNotMet(f"{timeout_s:g} s were not enough: {reason}")

    async def start_transfer(self, options: SwapOptions, file: Path, header: bytes | None = None) -> None:
        """Pauses the engine and prepares it for the weights that the trainer sends.

        Args:
            header: one worker writes them to `file` too, a safetensors file that begins so; with `None` no worker.
        """
        await self._llm.collective_rpc("begin_saving", args=(str(file), header))
        self._in_transfer = True
        await self._pause(options)
        await self._llm.start_weight_update()

    async def update_transfer(self, update_info: Any, silence_s: float) -> None:
        """Receives the weights that `update_info` announces.

        Raises:
            TransferBroken: a worker failed, or nothing arrived for `silence_s` seconds. The engine stays paused.
        """
        await self._call_workers("receive_transfer", update_info, silence_s, failure=TransferBroken)

    async def saved_transfer(self) -> Written:
        """Waits until all of the last transfer was written to its file.

        Raises:
            WeightsNotSaved: it could not be.
        """
        while True:
            of_workers: list[tuple[Written | None, str | None] | None] = await self._llm.collective_rpc("saved_weights")
            written, error = next(filter(None, of_workers), (None, NOT_ASKED))
            if error is not None:
                raise WeightsNotSaved(error)
            if written is not None:
                return written
            await asyncio.sleep(STAGING_POLL_S)

    async def abandon_transfer(self) -> None:
        """Lets go of a trainer whose transfer broke off. The engine stays paused until full weights are swapped in."""
        await self._call_workers("abandon_transfer", failure=TransferBroken)

    async def apply_transfer(self) -> None:
        """Puts the received weights in place; the engine stays paused."""
        await self._llm.finish_weight_update()

    async def finish_transfer(self, version: int) -> CommandCosts:
        """Labels the weights `version` and resumes. Swap and pause are the whole time since `start_transfer`."""
        _, pause_s = await self._resume(version, self._llm.collective_rpc("end_transfer"))
        self.accept()
        return self._costs_of_pause(pause_s, pause_s)

    async def checksum(self) -> str:
        """A sha-256 over the weights in the workers' memory, computed in small steps between those of the engine."""
        while True:
            checksums = await self._llm.collective_rpc("checksum_weights", args=(CHECKSUM_STEP_S,))
            if all(checksums):
                [first, *others] = checksums
                return hashlib.sha256("".join(checksums).encode()).hexdigest() if others else str(first)
            await asyncio.sleep(CHECKSUM_PAUSE_S)

    async def _call_workers(
        self, method: str, *arguments: Any, failure: type[Exception] = WeightsNotLoaded
    ) -> list[Any]:
        """The result of each worker, which returns it with an error. Raises `failure` if one has an error."""
        results: list[tuple[Any, str | None]] = await self._llm.collective_rpc(method, args=arguments)
        for worker, (_, error) in enumerate(results):
            if error is not None:
                raise failure(f"Worker {worker}: {error}")
        return [result for result, _ in results]

    async def _pause(self, options: SwapOptions, is_trial: bool = False) -> None:
        mode = options.mode
        if self._adapters.current is not None:
            # The adapter belongs to the old weights: no token may be generated with it on top of the new ones.
            self.may_generate.clear()
            mode = "wait" if mode == "keep" else mode
        if self._adapters.versions:
            # The same holds for the adapters of named policies. Their generations are interrupted, so that the others
            # need not end first.
            self.may_generate.clear()
        interrupted = self._adapters.named_generations
        self.aborts += is_trial or mode == "abort" or bool(interrupted)
        if interrupted:
            await self._llm.abort(interrupted)
        # Those that are waited for have ended, and the caches of others stay without a reset.
        is_recomputed = options.mode != "wait" and mode != "wait" and options.reset_prefix_cache
        self._recomputed_tokens = self._ongoing_tokens() if is_recomputed else 0
        await pause_scheduler(self._llm, mode, options.reset_prefix_cache)
        if not options.reset_prefix_cache:
            # What the old weights saw of images is dropped by a swap in the worker alone: vLLM's scheduler would go on
            # counting on it, and the engine die at the next prompt with such an image.
            await self._llm.reset_encoder_cache()
        self._paused_at = time.perf_counter()
        self.is_paused = True

    def _costs_of_pause(self, swap_s: float, pause_s: float) -> CommandCosts:
        return CommandCosts(swap_s=swap_s, pause_s=pause_s, recomputed_tokens=self._recomputed_tokens)

    async def _resume(
        self, version: int, last_step: Awaitable[list[Any]], is_trial: bool = False
    ) -> tuple[list[Any], float]:
        """Runs `last_step`, labels the weights `version`, interrupts all generations in a trial, and resumes.

        All are sent without waiting for answers, and the engine runs them in this order; that shortens the pause. The
        generations of a trial are interrupted so late because hundreds of them, which begin again, take the processors
        from the swap. The engine resumes after a failed swap too, but then its worker exits instead of generating.

        Returns:
            The results of `last_step`, and the length of the pause in seconds; that of a trial ends with the label.
        """
        steps = [self._llm.update_weight_version(str(version))]
        if is_trial:
            # Those that wait in the engine's queue are interrupted too: the engine has to be empty.
            steps.append(pause_scheduler(self._llm, "abort", clear_cache=False))
        steps.append(self._llm.resume_generation())
        sent = [asyncio.create_task(ended_at(step)) for step in steps]
        try:
            # Sent first: the tasks start when this one waits.
            results = await last_step
            labelled_at, *_, resumed_at = await asyncio.gather(*sent)
        except BaseException:
            for task in sent:
                task.cancel()
            raise
        finally:
            self.is_paused = False
        self._in_transfer = False
        self.loaded = LoadedWeights(version)
        self._staged = None
        self.swaps += 1
        self._adapters.switch_to(None)
        self._adapters.serve({})
        return results, (labelled_at if is_trial else resumed_at) - self._paused_at


async def ended_at(step: Awaitable[None]) -> float:
    """The time of `time.perf_counter` when `step` has ended."""
    await step
    return time.perf_counter()
