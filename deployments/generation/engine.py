"""One vLLM engine: token ids in, token ids and log-probabilities out. Knows no Ray."""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.envs import enable_envs_cache
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError, VLLMServerError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.reader import Counter as MetricsCounter
from vllm.v1.metrics.reader import get_metrics_snapshot

from deployments.failures import GenerationCut, GenerationLost, GenerationRejected, Overloaded
from deployments.policy.commands import LoadedWeights, SwapOptions
from deployments.protocols import (
    Engine,
    Generation,
    GenerationRequest,
    GeneratorDescription,
    PrefixCacheTokens,
    SamplingOptions,
    WeightSpan,
    packed_ids,
    packed_logprobs,
)

Answer = TypeVar("Answer")
INITIAL_WEIGHT_VERSION = 0
WARM_UP_TOKENS = 8
WORKER_EXTENSION = "deployments.generation.worker_extension.WeightsWorkerExtension"
STAGING_POLL_S = 0.005
DIGEST_STEP_S = 0.02
DIGEST_PAUSE_S = 0.1
"""A digest of the weights takes this part of the engine's time away and no more: 0.02 of every 0.12 s."""


@dataclass(frozen=True, slots=True)
class SwapTimes:
    """Seconds: `swap_s` for changing the weights, `pause_s` in which no token was generated."""

    swap_s: float = 0.0
    pause_s: float = 0.0


class WeightsNotLoaded(Exception):
    """A worker could not read new weights, or not put them in place."""


class VLLMEngine(Engine):
    """Implements the `Engine` protocol on one `AsyncLLM`, and changes its weights."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.loaded = LoadedWeights(INITIAL_WEIGHT_VERSION)
        self._staged: int | None = None
        self._adapter: LoRARequest | None = None
        self._staged_adapter: LoRARequest | None = None
        self._adapter_users: Counter[int] = Counter()
        self._unloading: dict[asyncio.Task[bool], int] = {}
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._paused_at = 0.0
        self._cuts = 0
        """How often an update has cut the generations under way."""

    @classmethod
    async def start(cls, engine_args: dict[str, Any]) -> Self:
        """Loads the model and generates once, so that the first caller does not pay for warming up.

        Args:
            engine_args: fields of vLLM's `AsyncEngineArgs`; what vLLM refuses is raised as vLLM states it.
        """
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**engine_args, logprobs_mode="processed_logprobs", worker_extension_cls=WORKER_EXTENSION)
        )
        enable_envs_cache()
        engine = cls(llm)
        await llm.update_weight_version(str(INITIAL_WEIGHT_VERSION))
        await asyncio.gather(
            *(
                engine.generate(
                    GenerationRequest(f"warm-up-{stop_strings}", [0], WARM_UP_TOKENS, stop_strings, SamplingOptions())
                )
                for stop_strings in ((), ("never",))
            )
        )
        return engine

    async def generate(self, request: GenerationRequest) -> Generation:
        """Runs one generation; cancelling it aborts it in the engine.

        Raises:
            GenerationRejected: the engine refuses the request as it is.
            Overloaded: the engine's queue is full.
            GenerationCut: an update aborted it.
            GenerationLost: the engine broke, or somebody else aborted the request.
        """
        prompt = tokens_input(list(request.prompt_token_ids))
        await self._admitting.wait()
        adapter, cuts = self._adapter, self._cuts
        try:
            with self._using(adapter):
                async for output in self._llm.generate(
                    prompt, sampling_params(request), request_id=request.request_id, lora_request=adapter
                ):
                    completion = output.outputs[0]
        except VLLMClientError as error:
            raise GenerationRejected(f"The engine refused the generation: {error}") from error
        except (GracefulHTTPError, RetryableRequestError) as error:
            raise Overloaded(f"The engine could not take the generation: {error}") from error
        except VLLMServerError as error:
            raise GenerationLost(f"The engine failed during the generation: {error or type(error).__name__}") from error
        if completion.finish_reason == "abort" and cuts != self._cuts:
            raise GenerationCut("An update of the weights cut the generation.")
        return generation_of(completion, None if adapter is None else adapter.lora_int_id)

    def describe(self) -> GeneratorDescription:
        model = self._llm.model_config
        return GeneratorDescription(
            model=str(model.model), max_model_len=model.max_model_len, vocab_size=model.get_vocab_size()
        )

    def prefix_cache_tokens(self) -> PrefixCacheTokens:
        """By vLLM's own counters."""
        counted = {metric.name: metric.value for metric in get_metrics_snapshot() if isinstance(metric, MetricsCounter)}
        return PrefixCacheTokens(counted["vllm:prefix_cache_queries"], counted["vllm:prefix_cache_hits"])

    @property
    def ongoing_generations(self) -> int:
        """Those that run or wait in the engine."""
        return self._llm.get_num_unfinished_requests()

    @property
    def adapters_in_use(self) -> set[int]:
        """Versions whose files must stay: for want of room vLLM drops an adapter and reads it anew when it is due."""
        current = set() if self._adapter is None else {self._adapter.lora_int_id}
        return current | set(self._adapter_users) | set(self._unloading.values())

    async def stage(self, version: int, path: Path) -> None:
        """Reads the safetensors file at `path` ahead, while generations go on.

        Raises:
            WeightsNotLoaded: the file cannot be read.
        """
        await self._llm.collective_rpc("begin_staging", args=(str(path),))
        while not all(unless_failed(await self._llm.collective_rpc("staged"))):
            await asyncio.sleep(STAGING_POLL_S)
        self._staged, self._staged_adapter = version, None

    async def stage_adapter(self, version: int, folder: Path) -> None:
        """Loads the LoRA adapter in `folder`, as PEFT saves it; it must stay as long as it may be used.

        Raises:
            Exception: what vLLM has against the adapter (rank, modules, `enable_lora` not set).
        """
        adapter = LoRARequest(f"policy-{version}", version, str(folder))
        await self._llm.add_lora(adapter)
        self._staged, self._staged_adapter = version, adapter

    async def swap(self, options: SwapOptions) -> SwapTimes:
        """Changes to what was staged. An adapter needs no pause: generations under way end with the old one.

        Raises:
            WeightsNotLoaded: it failed; the engine generates nothing any more, for its weights are of no version.
        """
        version = self._staged
        if version is None:
            raise RuntimeError("Nothing is staged.")
        if self._staged_adapter is not None:
            self._use_adapter(self._staged_adapter)
            self.loaded = LoadedWeights(self.loaded.full, version)
            return SwapTimes()
        await self._pause(options)
        # The pause waits for no answer: were the swap to fail, its worker would end rather than generate.
        swaps, pause_s = await self._resume(version, self._swap_staged())
        self._staged = None
        return SwapTimes(max(swaps), pause_s)

    async def _swap_staged(self) -> list[float]:
        return unless_failed(await self._llm.collective_rpc("swap_staged"))

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Meets the trainer for transfers (how is `weight_transfer_config`'s to say); returns when both are there."""
        await self._llm.shutdown_weight_transfer_engine()
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info))

    async def start_transfer(self, options: SwapOptions) -> None:
        await self._pause(options)
        await self._llm.start_weight_update()

    async def update_transfer(self, update_info: Any) -> None:
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info))

    async def settle_transfer(self) -> None:
        """Makes what was received the weights; the engine stays paused."""
        await self._llm.finish_weight_update()

    async def finish_transfer(self, version: int) -> SwapTimes:
        _, pause_s = await self._resume(version, self._llm.collective_rpc("forget_digest"))
        return SwapTimes(pause_s, pause_s)

    async def weight_digest(self) -> str:
        """Sha-256 over the weights as they lie in the workers, made in small steps between the engine's own."""
        while True:
            digests = await self._llm.collective_rpc("digest_weights", args=(DIGEST_STEP_S,))
            if all(digests):
                return str(digests[0]) if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
            await asyncio.sleep(DIGEST_PAUSE_S)

    async def _pause(self, options: SwapOptions) -> None:
        mode = options.mode
        if self._adapter is not None:
            # With an adapter of the old weights on top of the new ones, tokens would be of no version at all.
            self._admitting.clear()
            mode = "wait" if mode == "keep" else mode
        self._cuts += mode == "abort"
        # `AsyncLLM.pause_generation` does the same and then sleeps, which is longer than a small model's swap.
        await self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=options.reset_prefix_cache)
        self._paused_at = time.perf_counter()

    async def _resume(self, version: int, last: Awaitable[list[Any]]) -> tuple[list[Any], float]:
        """Carries out `last` and goes on; returns what the workers answered to it, and the seconds since the pause."""
        # All are sent at once and carried out in their order: `last` from here, the two as soon as this task waits.
        relabelled = asyncio.create_task(self._llm.update_weight_version(str(version)))
        resumed = asyncio.create_task(self._resume_scheduler())
        try:
            answers = await last
            await relabelled
            resumed_at = await resumed
        except BaseException:
            relabelled.cancel()
            resumed.cancel()
            raise
        self.loaded = LoadedWeights(version)
        self._use_adapter(None)
        self._admitting.set()
        return answers, resumed_at - self._paused_at

    async def _resume_scheduler(self) -> float:
        await self._llm.resume_generation()
        return time.perf_counter()

    @contextmanager
    def _using(self, adapter: LoRARequest | None) -> Iterator[None]:
        """Counts the generations that use an adapter: it is unloaded when it is neither used nor current any more."""
        if adapter is None:
            yield
            return
        self._adapter_users[adapter.lora_int_id] += 1
        try:
            yield
        finally:
            self._adapter_users[adapter.lora_int_id] -= 1
            self._unload_if_unused(adapter)

    def _use_adapter(self, adapter: LoRARequest | None) -> None:
        previous, self._adapter, self._staged_adapter = self._adapter, adapter, None
        if previous is not None:
            self._unload_if_unused(previous)

    def _unload_if_unused(self, adapter: LoRARequest) -> None:
        if adapter is not self._adapter and not self._adapter_users[adapter.lora_int_id]:
            del self._adapter_users[adapter.lora_int_id]
            unloading = asyncio.create_task(self._llm.remove_lora(adapter.lora_int_id))
            self._unloading[unloading] = adapter.lora_int_id
            unloading.add_done_callback(self._unloading.pop)

    async def is_alive(self) -> bool:
        try:
            await self.check_health()
        except EngineDeadError:
            return False
        return True

    async def check_health(self) -> None:
        """Raises what killed the engine, if it is dead."""
        await self._llm.check_health()

    def shutdown(self) -> None:
        self._llm.shutdown()


def unless_failed(answers: Sequence[tuple[Answer, str | None]]) -> list[Answer]:
    """What each worker answered; raises `WeightsNotLoaded` if one of them failed."""
    for worker, (_, error) in enumerate(answers):
        if error is not None:
            raise WeightsNotLoaded(f"Worker {worker}: {error}")
    return [answer for answer, _ in answers]


def sampling_params(request: GenerationRequest) -> SamplingParams:
    options = request.sampling
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        ignore_eos=options.ignore_eos,
        seed=options.seed,
        max_tokens=request.max_new_tokens,
        stop=list(request.stop_strings),
        include_stop_str_in_output=True,
        # Stop strings are found in text; without them decoding is the ingress's, once per message.
        detokenize=bool(request.stop_strings),
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def generation_of(completion: CompletionOutput, adapter_version: int | None = None) -> Generation:
    """Tokens that came through an adapter are of the adapter's version: the engine's spans only know full weights."""
    if completion.finish_reason not in ("stop", "length"):
        raise GenerationLost(f"The engine ended the generation early ({completion.finish_reason}).")
    token_ids = packed_ids(completion.token_ids)
    logprobs = packed_logprobs(completion.logprobs.logprobs if isinstance(completion.logprobs, FlatLogprobs) else ())
    if len(logprobs) != len(token_ids):
        raise GenerationLost(f"The engine gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens.")
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=completion.finish_reason,  # type: ignore[arg-type]
        weight_versions=tuple(
            WeightSpan(span.version, span.start, span.end) for span in completion.weight_versions or ()
        )
        if adapter_version is None
        else (WeightSpan(str(adapter_version), 0, len(token_ids)),),
    )
