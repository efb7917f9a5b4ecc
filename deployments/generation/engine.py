"""One vLLM engine: token ids in, token ids and log-probabilities out. Knows no Ray."""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self
from uuid import uuid4

import vllm
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.envs import enable_envs_cache
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError, VLLMServerError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

from deployments.failures import (
    GenerationLost,
    GenerationNotFinite,
    GenerationRejected,
    OtherVersionLoaded,
    Overloaded,
    ReplicaShuttingDown,
    RolloutFailure,
    TurnTimedOut,
)
from deployments.generation.adapters import Adapters, LoadedAdapter
from deployments.generation.canary import CANARY_TOKENS, canary_params, canary_prompts, refuse_bad_canary
from deployments.generation.engine_progress import EngineProgress, StepCounter
from deployments.generation.engine_requests import (
    generation_of,
    sampling_params,
    scored_prompt_of,
    scoring_params,
    warm_up_requests,
)
from deployments.generation.running_generations import RunningGeneration, RunningGenerations, StallWatch
from deployments.generation.weight_updater import WeightUpdater
from deployments.protocols import (
    Engine,
    Generation,
    GenerationRequest,
    GeneratorDescription,
    PrefixCacheTokens,
    ReplicaLoad,
    SamplingOptions,
    ScoringRequest,
    packed_ids,
    packed_logprobs,
)
from deployments.rpc.weight_demands import refuse_other_version

WORKER_EXTENSION = "deployments.generation.worker_extension.WeightsWorkerExtension"
WATCH_EVERY_S = 1.0
NOT_WITH_THIS_ADAPTER = "The engine cannot score prompts with an adapter that changes the output layer (lm_head)."
ABORTED_BY_ENGINE = "The engine ended the generation early."
logger = logging.getLogger("rollout_service.generation")


class VLLMEngine(Engine):
    """Generates on one `AsyncLLM`; `weights` changes what it generates with."""

    def __init__(self, llm: AsyncLLM, steps: StepCounter, patches_deltas: bool = False) -> None:
        """Args: `steps` is among the stat loggers of `llm`; `patches_deltas` as in `start`."""
        self._llm = llm
        self.adapters = Adapters(llm)
        self.weights = WeightUpdater(llm, self.adapters, patches_deltas, lambda: self.load().kv_tokens)
        self._running = RunningGenerations()
        self._stall_watch = StallWatch()
        self._watching: asyncio.Task[None] | None = None
        self._progress = EngineProgress(llm)
        self._steps = steps
        self._death_is_logged = False

    @classmethod
    async def start(cls, engine_args: dict[str, Any], patches_deltas: bool = False) -> Self:
        """Loads the model and generates once, so that no caller waits for the warm-up.

        Args:
            engine_args: fields of vLLM's `AsyncEngineArgs`.
            patches_deltas: apply deltas to the weights in the engine, in place of loading what they make.

        Raises:
            Exception: what vLLM raises for arguments that it refuses.
            ValueError: vLLM has no weight transfer backend of the given name.
        """
        args = AsyncEngineArgs(**engine_args, logprobs_mode="processed_logprobs", worker_extension_cls=WORKER_EXTENSION)
        refuse_unknown_backend(args)
        steps = StepCounter()
        llm = AsyncLLM.from_engine_args(args, stat_loggers=[lambda *_: steps])
        enable_envs_cache()
        engine = cls(llm, steps, patches_deltas)
        await engine.weights.label_initial_weights()
        await asyncio.gather(*(engine.generate(request) for request in warm_up_requests()))
        return engine

    async def generate(self, request: GenerationRequest) -> Generation:
        """Runs one generation; cancelling the call aborts it in the engine. Failures are logged.

        Raises:
            GenerationRejected: the engine refuses the request as it is.
            Overloaded: the engine's queue is full.
            GenerationLost: the engine broke.
            OtherVersionLoaded: an update took the place of the weights that it demands, while it waited for that.
            GenerationNotFinite: a log-probability is NaN or infinite.
        """
        with self._running.running(request) as running:
            if request.token_timeout_s is not None and self._watching is None:
                self._watching = asyncio.create_task(self._watch())
            try:
                generation = await self._generate(running)
            except RolloutFailure as failure:
                self._log(failure, request)
                raise
        if generation.failure is not None:
            self._log(generation.failure, request)
        return generation

    async def interrupt(self, generation_ids: Iterable[str], failure: RolloutFailure | None = None) -> None:
        await self._interrupt(self._running.of_ids(generation_ids), failure)

    async def _interrupt(self, generations: Sequence[RunningGeneration], failure: RolloutFailure | None) -> None:
        for generation in generations:
            generation.interrupt(failure)
        if generations:
            # vLLM returns the tokens that it has, also when its engine process hangs.
            await self._llm.abort([generation.engine_id for generation in generations])

    async def _watch(self) -> None:
        """Interrupts the generations that stall, while any run."""
        try:
            while self._running:
                await asyncio.sleep(WATCH_EVERY_S)
                await self._interrupt_stalled()
        finally:
            self._watching = None

    async def _interrupt_stalled(self) -> None:
        running = {generation.engine_id: generation for generation in self._running}
        tokens = self._progress.tokens(running)
        timeouts_s = {name: running[name].request.token_timeout_s for name in tokens}
        steps, is_paused = self._steps.taken, self.weights.is_paused
        for name in self._stall_watch.stalled(time.monotonic(), tokens, timeouts_s, steps, is_paused):
            failure = TurnTimedOut(f"The generation had no new token for {timeouts_s[name]:g} s.")
            await self._interrupt([running[name]], failure)

    async def _generate(self, running: RunningGeneration) -> Generation:
        request = running.request
        if not self.weights.may_generate.is_set():
            await first_of(self.weights.may_generate, running.interrupted)
            if running.interrupted.is_set():
                return interrupted(running.failure)
            # The weights have changed meanwhile.
            refuse_other_version(request, self.version_of(request.policy))
        adapter, version = self.adapters.of(request.policy), self.version_of(request.policy)
        label = None if adapter is None else adapter.label
        aborts, swaps = self.weights.aborts, self.weights.swaps
        if isinstance(request, ScoringRequest):
            if adapter is not None and adapter.changes_head:
                raise GenerationRejected(NOT_WITH_THIS_ADAPTER)
            is_full = len(request.prompt_token_ids) == self._llm.model_config.max_model_len
            prompt = request.prompt_token_ids[:-1] if is_full else request.prompt_token_ids
            output = await self._output_of(running, prompt, scoring_params(request, is_full), adapter)
            if output.outputs[0].finish_reason != "abort":
                scored = scored_prompt_of(request, output, label, is_full)
                # One that began before an update and ended after it may be a mixture: it is computed again.
                is_whole = scored.weight_version == (label or str(version)) and swaps == self.weights.swaps
                return scored if is_whole else interrupted(None)
            generation = interrupted(None)
        else:
            output = await self._output_of(running, request.prompt_token_ids, sampling_params(request), adapter)
            generation = generation_of(output.outputs[0], label)
            if request.policy is not None and swaps != self.weights.swaps:
                # Other full weights are under the adapter since: which tokens they made is not known.
                return interrupted(None)
        if generation.finish_reason == "abort":
            asked_for = running.interrupted.is_set() or aborts != self.weights.aborts
            return replace(generation, failure=running.failure if asked_for else GenerationLost(ABORTED_BY_ENGINE))
        return generation

    async def _output_of(
        self,
        running: RunningGeneration,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        adapter: LoadedAdapter | None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """The engine's last output. Raises the failure that stands for what the engine raises.

        Args:
            cache_salt: the prefix cache is shared only with generations that have the same.
        """
        prompt, priority = tokens_input(list(prompt_token_ids), cache_salt=cache_salt), running.request.virtual_time
        lora = None if adapter is None else adapter.request
        try:
            with self.adapters.used_by_generation(adapter, running.engine_id):
                async for output in self._llm.generate(
                    prompt, params, request_id=running.engine_id, lora_request=lora, priority=priority
                ):
                    last = output
        except VLLMClientError as error:
            raise GenerationRejected(f"The engine refused the generation: {error}") from error
        except (GracefulHTTPError, RetryableRequestError) as error:
            raise Overloaded(f"The engine could not accept the generation: {error}") from error
        except VLLMServerError as error:
            raise GenerationLost(f"The engine failed during the generation: {error or type(error).__name__}") from error
        return last

    def version_of(self, policy: str | None) -> int | None:
        """The version that new generations of this policy use; `None` if there is none."""
        if policy is None:
            return self.weights.loaded.version
        return self.adapters.versions.get(policy)

    async def generate_canary(self) -> None:
        """Generates some tokens with the current weights, also during a trial of them; raises as `try_adapter` does."""
        await self.try_adapter(self.adapters.current)

    async def try_adapter(self, adapter: LoadedAdapter | None) -> None:
        """Generates some tokens with an adapter, or with the full weights alone.

        Raises:
            GenerationNotFinite: a log-probability is NaN or infinite.
            GenerationLost: the engine broke.
        """
        config = self._llm.model_config
        prompts = canary_prompts(config.get_vocab_size(), config.max_model_len)
        requests = [GenerationRequest("canary", prompt, CANARY_TOKENS, (), SamplingOptions()) for prompt in prompts]
        with ExitStack() as stack:
            running = [stack.enter_context(self._running.running(request)) for request in requests]
            params = [canary_params() for _ in running]
            # No rollout may find in the prefix cache what a version has computed that is refused afterwards.
            salt = uuid4().hex
            outputs = await asyncio.gather(
                *(self._output_of(*each, adapter, salt) for each in zip(running, prompts, params, strict=True))
            )
        for output in outputs:
            refuse_bad_canary(output)

    def describe(self) -> GeneratorDescription:
        config, model = self._llm.vllm_config, self._llm.model_config
        return GeneratorDescription(
            model=str(model.model),
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            # vLLM notes the commit that it has loaded, also where the config names a branch or nothing.
            revision=getattr(model.hf_config, "_commit_hash", None) or model.revision,
            engine=f"vllm {vllm.__version__}",
            max_num_seqs=config.scheduler_config.max_num_seqs,
            kv_cache_size_tokens=config.cache_config.kv_cache_size_tokens,
            max_loras=None if config.lora_config is None else config.lora_config.max_loras,
        )

    def prefix_cache_tokens(self) -> PrefixCacheTokens:
        """From vLLM's own counters."""
        counted = {metric.name: metric.value for metric in get_metrics_snapshot() if isinstance(metric, Counter)}
        return PrefixCacheTokens(counted["vllm:prefix_cache_queries"], counted["vllm:prefix_cache_hits"])

    def load(self) -> ReplicaLoad:
        return replace(self._progress.load(), unnamed_has_adapter=self.adapters.current is not None)

    async def is_alive(self) -> bool:
        try:
            await self.check_health()
        except EngineDeadError:
            return False
        return True

    async def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine has died."""
        try:
            await self._llm.check_health()
        except EngineDeadError as error:
            self._log_death(error)
            raise

    def shutdown(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._llm.shutdown()

    def _log(self, failure: RolloutFailure, request: GenerationRequest) -> None:
        about = {
            "request_id": request.request_id,
            "rollout_id": request.rollout_id,
            "generation_id": request.generation_id,
        }
        if isinstance(failure, ReplicaShuttingDown | OtherVersionLoaded | Overloaded):
            logger.info("%s", failure, extra=about)
        elif isinstance(failure.__cause__, EngineDeadError):
            self._log_death(failure.__cause__)
            logger.warning("%s", failure, extra=about)
        elif isinstance(failure, TurnTimedOut | GenerationNotFinite):
            # A traceback would say nothing: the engine raised no exception.
            logger.warning("%s", failure, extra=about)
        else:
            logger.warning("%s", failure, exc_info=failure, extra=about)

    def _log_death(self, error: EngineDeadError) -> None:
        """Only once: hundreds of generations fail with the engine."""
        if not self._death_is_logged:
            self._death_is_logged = True
            logger.error("The engine died; Serve replaces the replica.", exc_info=error)


def interrupted(failure: RolloutFailure | None) -> Generation:
    """A generation that was interrupted before its first token."""
    return Generation(packed_ids(()), packed_logprobs(()), "abort", failure=failure)


async def first_of(*events: asyncio.Event) -> None:
    """Returns when one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


def refuse_unknown_backend(args: AsyncEngineArgs) -> None:
    """Raises `ValueError` with the backends that exist; vLLM itself fails later, in a worker process."""
    backends = WeightTransferEngineFactory._registry.keys()
    if args.weight_transfer_config is not None and args.weight_transfer_config.backend not in backends:
        raise ValueError(
            f"engine.weight_transfer_config.backend: {args.weight_transfer_config.backend!r} does not exist; "
            f"vLLM has {', '.join(sorted(backends))}"
        )
