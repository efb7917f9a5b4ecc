"""One vLLM engine: token ids in, token ids and log-probabilities out. Knows no Ray."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, Self

import vllm
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.envs import enable_envs_cache
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError, VLLMServerError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerFactory
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
    VersionReplaced,
)
from deployments.generation.adapters import Adapters, LoadedAdapter
from deployments.generation.continued_completion import ContinuedCompletion
from deployments.generation.engine_health import EngineHealth, kill_child_processes
from deployments.generation.engine_progress import EngineProgress, StepCounter
from deployments.generation.engine_requests import (
    generation_of,
    health_params,
    health_request,
    sampling_params,
    scored_prompt_of,
    scoring_params,
    warm_up_requests,
)
from deployments.generation.running_generations import GenerationWatch, RunningGeneration, RunningGenerations
from deployments.generation.weight_updater import WeightUpdater
from deployments.generation.weights_canary import CANARY_TOKENS, WeightsCanary, canary_params, canary_prompts
from deployments.protocols.generation import (
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
from deployments.protocols.weight_versions import refuse_other_version
from deployments.upstream.vllm.logprob_texts import make_no_unseen_texts
from rollout_client.contract.base import label_of

WORKER_EXTENSION = "deployments.generation.worker_extension.WeightsWorkerExtension"
WATCH_EVERY_S = 1.0
NOT_WITH_THIS_ADAPTER = "The engine cannot score prompts with an adapter that changes the output layer (lm_head)."
ABORTED_BY_ENGINE = "The engine ended the generation early."
logger = logging.getLogger("rollout_service.generation")


class VLLMEngine(Engine):
    """Generates on one `AsyncLLM`; `weights` changes what it generates with."""

    def __init__(
        self, llm: AsyncLLM, steps: StepCounter, patches_deltas: bool = False, hang_timeout_s: float | None = None
    ) -> None:
        """Args: `steps` is among the stat loggers of `llm`; `patches_deltas` and `hang_timeout_s` as in `start`."""
        self._llm = llm
        self.adapters = Adapters(llm)
        self.weights = WeightUpdater(llm, self.adapters, patches_deltas, lambda: self.load().kv_tokens)
        self.canary = WeightsCanary(
            self.adapters, self._generate_canary, lambda: self.weights.swaps, self._canary_prompts
        )
        self._running = RunningGenerations()
        self._stall_watch = GenerationWatch()
        self._watching: asyncio.Task[None] | None = None
        self._progress = EngineProgress(llm)
        self._steps = steps
        self._death_is_logged = False
        self._health = EngineHealth(hang_timeout_s, self._observed, self._generate_health, kill_child_processes)

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's own engine, for its serving layers."""
        return self._llm

    @classmethod
    async def start(
        cls,
        engine_args: dict[str, Any],
        patches_deltas: bool = False,
        hang_timeout_s: float | None = None,
        stat_loggers: Sequence[StatLoggerFactory] = (),
    ) -> Self:
        """Loads the model and generates once, so that no caller waits for the warm-up.

        Args:
            engine_args: fields of vLLM's `AsyncEngineArgs`.
            patches_deltas: apply deltas to the weights in the engine, in place of loading what they make.
            hang_timeout_s: as in `EngineSettings`.
            stat_loggers: vLLM's, beside its own and ours.

        Raises:
            Exception: what vLLM raises for arguments that it refuses.
            ValueError: vLLM has no weight transfer backend of the given name.
        """
        args = AsyncEngineArgs(**engine_args, logprobs_mode="processed_logprobs", worker_extension_cls=WORKER_EXTENSION)
        refuse_unknown_backend(args)
        steps = StepCounter()
        llm = AsyncLLM.from_engine_args(args, stat_loggers=[lambda *_: steps, *stat_loggers])
        make_no_unseen_texts(llm)
        enable_envs_cache()
        engine = cls(llm, steps, patches_deltas, hang_timeout_s)
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
        with self._watched(request) as running:
            try:
                generation = await self._generate(running)
            except RolloutFailure as failure:
                self._log(failure, request)
                raise
        if generation.failure is not None:
            self._log(generation.failure, request)
        return generation

    async def outputs(
        self, request: GenerationRequest, prompt: Any, params: SamplingParams, index: int = 0, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The engine's outputs for one choice (`n` 1) of a request of vLLM's own serving layers, with all versions.

        An update of the weights does not end it: it goes on with the new ones. `interrupt` ends it with an output whose
        `finish_reason` is "abort". Closing the generator aborts the request.

        Args:
            request: says which policy generates, when, and for whom.
            index: of the choice.
            options: further arguments of `AsyncLLM.generate`.

        Raises:
            GenerationLost: it was interrupted before it began, or the engine broke or ended it early.
            OtherVersionLoaded: other weights than those that it demands are loaded when it begins, or goes on.
            VersionReplaced: other weights than those that it demands have generated a part of it.
            TokensTooOld: its oldest tokens are more than `max_staleness` versions behind when it begins, or goes on.
            RolloutFailure: that with which it was interrupted.
            Exception: what else vLLM raises, whose serving layers answer with it.
        """
        completion = ContinuedCompletion(prompt["prompt_token_ids"], params, self._llm.get_tokenizer(), index)
        if request.oldest_version is None:
            # What goes on after an update has tokens of these.
            request = replace(request, oldest_version=self.version_of(request.policy))
        goes_on = True
        while goes_on:
            goes_on = False
            with self._watched(request) as running:
                async with aclosing(self._outputs_until_update(running, prompt, completion, options)) as outputs:
                    async for output, was_updated in outputs:
                        goes_on = was_updated and completion.interrupt(output)
                        if not goes_on or params.output_kind == RequestOutputKind.DELTA:
                            yield output

    async def _outputs_until_update(
        self,
        running: RunningGeneration,
        prompt: Any,
        completion: ContinuedCompletion,
        options: dict[str, Any],
    ) -> AsyncGenerator[tuple[RequestOutput, bool], None]:
        """The outputs of the completion's next request, each with whether an update of the weights has ended it."""
        request = running.request
        while not self.weights.may_generate.is_set():
            await first_of(self.weights.may_generate, running.interrupted)
            if running.interrupted.is_set():
                raise running.failure or GenerationLost("The generation was interrupted before it began.")
        # Nothing is waited for between this and the engine.
        refuse_other_version(request, self.version_of(request.policy))
        adapter = self.adapters.of(request.policy)
        lora, label = (None, None) if adapter is None else (adapter.request, adapter.label)
        prompt = {**prompt, "prompt_token_ids": completion.next_prompt()}
        params, aborts = completion.next_params(), self.weights.aborts
        options = options | {"lora_request": lora, "priority": request.virtual_time}
        with self.adapters.used_by_generation(adapter, running.engine_id):
            async with aclosing(self._engine_outputs(prompt, params, running, options)) as outputs:
                async for output in outputs:
                    is_aborted = output.outputs[0].finish_reason == "abort"
                    if is_aborted and running.failure is not None:
                        raise running.failure
                    was_updated = is_aborted and not running.interrupted.is_set() and aborts != self.weights.aborts
                    is_asked_for = was_updated or running.interrupted.is_set() or completion.must_be_stopped
                    if is_aborted and not is_asked_for:
                        raise GenerationLost(ABORTED_BY_ENGINE)
                    whole = completion.add(output, label)
                    refuse_other_spans(request, whole.outputs[0].weight_versions or ())
                    if completion.must_be_stopped:
                        await self._llm.abort([running.engine_id])
                    yield whole, was_updated

    async def _engine_outputs(
        self, prompt: Any, params: SamplingParams, running: RunningGeneration, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Raises `GenerationLost` if the engine breaks, which `_log` tells; else what vLLM raises."""
        try:
            async with aclosing(self._llm.generate(prompt, params, running.engine_id, **options)) as outputs:
                async for output in outputs:
                    yield output
        except VLLMServerError as error:
            lost = GenerationLost(f"The engine failed during the generation: {error or type(error).__name__}")
            lost.__cause__ = error
            self._log(lost, running.request)
            raise lost from error

    @contextmanager
    def _watched(self, request: GenerationRequest) -> Iterator[RunningGeneration]:
        """For the length of the block the generation runs: it can be interrupted, and is when it stalls."""
        with self._running.running(request) as running:
            if request.token_timeout_s is not None and self._watching is None:
                self._watching = asyncio.create_task(self._watch())
            yield running

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
                    prompt,
                    params,
                    request_id=running.engine_id,
                    lora_request=lora,
                    priority=priority,
                    trace_headers=trace_headers_of(running.request),
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

    def _canary_prompts(self) -> Sequence[Sequence[int]]:
        config = self._llm.model_config
        return canary_prompts(config.get_vocab_size(), config.max_model_len)

    async def _generate_canary(
        self, prompt: Sequence[int], adapter: LoadedAdapter | None, cache_salt: str
    ) -> RequestOutput:
        request = GenerationRequest("canary", prompt, CANARY_TOKENS, (), SamplingOptions())
        with self._running.running(request) as running:
            return await self._output_of(running, prompt, canary_params(), adapter, cache_salt)

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
            max_lora_rank=0 if config.lora_config is None else config.lora_config.max_lora_rank,
        )

    def prefix_cache_tokens(self) -> PrefixCacheTokens:
        """From vLLM's own counters."""
        counted = {metric.name: metric.value for metric in get_metrics_snapshot() if isinstance(metric, Counter)}
        return PrefixCacheTokens(counted["vllm:prefix_cache_queries"], counted["vllm:prefix_cache_hits"])

    def load(self) -> ReplicaLoad:
        return replace(self._progress.load(), unnamed_has_adapter=self.adapters.current is not None)

    async def is_alive(self) -> bool:
        try:
            await self._llm.check_health()
        except EngineDeadError as error:
            self._log_death(error)
            return False
        return True

    async def answer(self) -> None:
        """Raises `GenerationLost` if the engine has died, or seems to hang."""
        if not await self.is_alive():
            raise GenerationLost("The engine of the generator replica died; the replica is being replaced.")
        self._health.refuse_suspect()

    async def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine has died, or what `EngineHealth.check` raises."""
        try:
            await self._llm.check_health()
        except EngineDeadError as error:
            self._log_death(error)
            raise
        self._health.check()

    def _observed(self) -> tuple[int, int, bool]:
        return self._steps.taken, self._llm.get_num_unfinished_requests(), self.weights.is_paused

    async def _generate_health(self) -> None:
        request = health_request()
        await self.weights.may_generate.wait()
        with self._running.running(request) as running:
            output = await self._output_of(running, request.prompt_token_ids, health_params(request), None)
        generation_of(output.outputs[0], None)

    def shutdown(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._health.close()
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
            logger.info("%s", failure, extra=about)
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


def refuse_other_spans(request: GenerationRequest, spans: Iterable[WeightVersionSpan]) -> None:
    """Raises `VersionReplaced` if another version than the one that the request demands has generated a token."""
    if request.weight_version is None:
        return
    demanded = label_of(request.policy, request.weight_version)
    other = next((span.version for span in spans if span.version != demanded and span.end > span.start), None)
    if other is not None:
        raise VersionReplaced(
            f"Version {demanded} must generate every token, and version {other} took its place before the end. Demand "
            "another version, or push new weights when calls have ended."
        )


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


def trace_headers_of(request: GenerationRequest) -> dict[str, str] | None:
    """With `otlp_traces_endpoint` among its arguments vLLM traces the generation below this span."""
    return {"traceparent": request.traceparent} if request.traceparent else None


def refuse_unknown_backend(args: AsyncEngineArgs) -> None:
    """Raises `ValueError` with the backends that exist; vLLM itself fails later, in a worker process."""
    backends = WeightTransferEngineFactory._registry.keys()
    if args.weight_transfer_config is not None and args.weight_transfer_config.backend not in backends:
        raise ValueError(
            f"engine.weight_transfer_config.backend: {args.weight_transfer_config.backend!r} does not exist; "
            f"vLLM has {', '.join(sorted(backends))}"
        )
