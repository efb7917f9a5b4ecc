"""One vLLM engine: token ids in, token ids and log-probabilities out. Knows no Ray."""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

import vllm
from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.envs import enable_envs_cache
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError, VLLMServerError
from vllm.inputs.engine import MultiModalInput, TokensInput, tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.failures import GenerationLost, GenerationRejected, Overloaded, RolloutFailure
from deployments.generation.adapters import Adapters, LoadedAdapter
from deployments.generation.engine_images import EngineImages
from deployments.generation.engine_outputs import (
    ABORTED_BY_ENGINE,
    CompletionOutputs,
    RunningGeneration,
    RunningGenerations,
    engine_failed,
    log_failure,
)
from deployments.generation.engine_requests import generation_of, sampling_params, scored_prompt_of, scoring_params
from deployments.generation.health import EngineWatch, ReplicaUnusable, kill_child_processes
from deployments.generation.settings import DRAFT_METHODS
from deployments.generation.weight_updater import INITIAL_VERSION, WeightUpdater
from deployments.generation.weights_canary import WeightsCanary, canary_params, canary_prompts
from deployments.protocols.generation import (
    Engine,
    Generation,
    GenerationRequest,
    SamplingOptions,
    ScoringRequest,
    packed_ids,
    packed_logprobs,
    takes_no_images,
)
from deployments.protocols.images import ImageSpan, ImageStore, ImageTokens
from deployments.protocols.model_server import public_model_name
from deployments.protocols.replicas import GeneratorDescription, ReplicaLoad
from deployments.protocols.weight_versions import refuse_other_version
from deployments.upstream.vllm.engine_progress import EngineProgress, StepCounter
from deployments.upstream.vllm.held_outputs import hold_outputs
from deployments.upstream.vllm.token_texts import install_token_texts
from deployments.upstream.vllm.weight_transfer import reject_unknown_backend

_WARM_UP_TOKENS = 8
logger = logging.getLogger("rollout_service.generation")
ALL_LOGPROBS = -1
"""vLLM's `max_logprobs` for no bound."""
WORKER_EXTENSION = "deployments.generation.worker_extension.WeightsWorkerExtension"


class VLLMEngine(Engine):
    """Generates on one `AsyncLLM`; `weights` changes what it generates with."""

    def __init__(self, llm: AsyncLLM, steps: StepCounter, hang_timeout_s: float | None = None) -> None:
        """`steps` is among the stat loggers of `llm`; `hang_timeout_s` as in `start`."""
        self._llm = llm
        self._progress = EngineProgress(llm)
        self.adapters = Adapters(llm)
        self.weights = WeightUpdater(llm, self.adapters)
        self.canary = WeightsCanary(
            self.adapters, self._generate_canary, lambda: self.weights.swaps, self._canary_prompts
        )
        self._steps = steps
        self._running = RunningGenerations(llm)
        self.completions = CompletionOutputs(llm, self.weights, self.adapters, self._running)
        self.images: EngineImages | None = None
        """`None` for an engine that takes no images."""
        self._watch = EngineWatch(hang_timeout_s)

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's own engine, for its serving layers."""
        return self._llm

    @classmethod
    async def start(
        cls,
        engine_args: dict[str, Any],
        hang_timeout_s: float | None = None,
        images: ImageStore | None = None,
    ) -> Self:
        """Loads the model and generates once, so that no caller waits for the warm-up.

        Args:
            engine_args: fields of vLLM's `AsyncEngineArgs`.
            hang_timeout_s: as in `EngineSettings`.
            images: has the images that prompts show; for a model that sees.

        Raises:
            ImagesUnsupported: `images` is given, and the model sees none, or writes them in another way than our logs.
            Exception: what vLLM raises for arguments that it refuses.
            ValueError: vLLM has no weight transfer backend of the given name, or it would draft tokens unasked.
        """
        args = AsyncEngineArgs(**engine_args, logprobs_mode="processed_logprobs", worker_extension_cls=WORKER_EXTENSION)
        reject_unknown_backend(args)
        steps = StepCounter()
        config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        _look_at_drafts(config, is_asked=bool(engine_args.get("speculative_config")))
        hold_outputs(config)
        llm = AsyncLLM.from_vllm_config(
            config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[lambda *_: steps],
            enable_log_requests=args.enable_log_requests,
            disable_log_stats=args.disable_log_stats,
        )
        install_token_texts(llm)
        enable_envs_cache()
        engine = cls(llm, steps, hang_timeout_s)
        if images is not None:
            engine.images = await asyncio.to_thread(EngineImages, llm, images)
        # Its outputs name the weights that it has started with.
        await llm.update_weight_version(str(INITIAL_VERSION))
        # With a stop string, because vLLM detokenizes only with one.
        warm_up = GenerationRequest("warm-up", [0], _WARM_UP_TOKENS, ("never",), SamplingOptions())
        await engine.generate(warm_up)
        await engine.canary.try_current()
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
            try:
                generation = await self._generate(running)
            except RolloutFailure as failure:
                log_failure(failure, request)
                raise
        if generation.failure is not None:
            log_failure(generation.failure, request)
        return generation

    async def interrupt(self, generation_ids: Iterable[str], failure: RolloutFailure | None = None) -> None:
        await self._running.interrupt(generation_ids, failure)

    async def _generate(self, running: RunningGeneration) -> Generation:
        request = running.request
        prompt = await self.prompt_of(request.prompt_token_ids, request.images)
        if not self.weights.may_generate.is_set():
            await running.wait_until_interrupted_or(self.weights.may_generate)
        if running.interrupted.is_set():
            return _interrupted(running.failure)
        # They may have changed while images were read, or while it waited.
        refuse_other_version(request, self.weights.version_of(request.policy))
        adapter, version = self.adapters.of(request.policy), self.weights.version_of(request.policy)
        label = None if adapter is None else adapter.label
        aborts, swaps = self.weights.aborts, self.weights.swaps
        if isinstance(request, ScoringRequest):
            is_full = len(request.prompt_token_ids) == self._llm.model_config.max_model_len
            scored_ids = request.prompt_token_ids[:-1] if is_full else request.prompt_token_ids
            output = await self._output_of(running, _tokens_of(scored_ids), scoring_params(request, is_full), adapter)
            if output.outputs[0].finish_reason != "abort":
                scored = scored_prompt_of(request, output, label, is_full)
                # One that began before an update and ended after it may be a mixture: it is computed again.
                is_whole = scored.weight_version == (label or str(version)) and swaps == self.weights.swaps
                return scored if is_whole else _interrupted(None)
            generation = _interrupted(None)
        else:
            output = await self._output_of(running, prompt, sampling_params(request), adapter)
            experts = self._llm.model_config.get_num_experts() if request.include.routed_experts else 0
            generation = generation_of(output.outputs[0], label, request, experts)
            generation = replace(generation, cached_tokens=output.num_cached_tokens or 0, batch_size=len(self._running))
            if adapter is not None and swaps != self.weights.swaps:
                # Other full weights are under the adapter since: which tokens they made is not known.
                return _interrupted(None)
        if generation.finish_reason == "abort":
            asked_for = running.interrupted.is_set() or aborts != self.weights.aborts
            return replace(generation, failure=running.failure if asked_for else GenerationLost(ABORTED_BY_ENGINE))
        return generation

    async def _output_of(
        self,
        running: RunningGeneration,
        prompt: TokensInput | MultiModalInput,
        params: SamplingParams,
        adapter: LoadedAdapter | None,
    ) -> RequestOutput:
        """The engine's last output. Raises the failure that stands for what the engine raises."""
        request = running.request
        lora = None if adapter is None else adapter.request
        try:
            with self.adapters.used_by_generation(adapter):
                async for output in self._llm.generate(
                    prompt,
                    params,
                    request_id=running.engine_id,
                    lora_request=lora,
                    priority=request.virtual_time,
                    # With `otlp_traces_endpoint` among its arguments vLLM traces the generation below this span.
                    trace_headers={"traceparent": request.traceparent} if request.traceparent else None,
                ):
                    last = output
        except VLLMClientError as error:
            raise GenerationRejected(f"The engine refused the generation: {error}") from error
        except (GracefulHTTPError, RetryableRequestError) as error:
            raise Overloaded(f"The engine could not accept the generation: {error}") from error
        except VLLMServerError as error:
            raise engine_failed(error) from error
        return last

    async def prompt_of(
        self, token_ids: Sequence[int], images: Sequence[ImageSpan], cache_salt: str | None = None
    ) -> TokensInput | MultiModalInput:
        """vLLM's input for a prompt.

        Raises:
            ImagesLost: the store of images cannot be reached.
            GenerationRejected: the model takes no images, or not these.
        """
        if not images:
            return _tokens_of(token_ids, cache_salt)
        if self.images is None:
            raise takes_no_images([span.name for span in images])
        return await self.images.prompt(token_ids, images, cache_salt)

    async def image_tokens(self, names: Sequence[str]) -> list[ImageTokens]:
        if self.images is None:
            raise takes_no_images(names)
        return await self.images.tokens(names)

    def _canary_prompts(self) -> Sequence[GenerationRequest]:
        config = self._llm.model_config
        return canary_prompts(config.get_vocab_size(), config.max_model_len)

    async def _generate_canary(
        self, request: GenerationRequest, adapter: LoadedAdapter | None, cache_salt: str
    ) -> RequestOutput:
        with self._running.running(request) as running:
            return await self._output_of(
                running, _tokens_of(request.prompt_token_ids, cache_salt), canary_params(), adapter
            )

    def describe(self) -> GeneratorDescription:
        config, model = self._llm.vllm_config, self._llm.model_config
        return GeneratorDescription(
            model=str(model.model),
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            # vLLM notes the commit that it has loaded, also where the config names a branch or nothing.
            revision=getattr(model.hf_config, "_commit_hash", None) or model.revision,
            engine=f"vllm {vllm.__version__}",
            model_names=(*served_names(model), str(model.model)),
            dtype=str(model.dtype).removeprefix("torch."),
            transfer_backend=None if config.weight_transfer_config is None else config.weight_transfer_config.backend,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            kv_cache_size_tokens=config.cache_config.kv_cache_size_tokens,
            kv_block_tokens=config.cache_config.block_size,
            max_loras=None if config.lora_config is None else config.lora_config.max_loras,
            max_lora_rank=0 if config.lora_config is None else config.lora_config.max_lora_rank,
            max_logprobs=None if model.max_logprobs == ALL_LOGPROBS else model.max_logprobs,
            returns_experts=config.aux_output_config.enable_return_routed_experts,
            takes_images=self.images is not None,
            settings_hash=config.compute_hash(),
            is_batch_invariant=envs.VLLM_BATCH_INVARIANT,
            image_token_ids=() if self.images is None else self.images.token_ids,
            drafts=None if config.speculative_config is None else config.speculative_config.method,
        )

    def load(self) -> ReplicaLoad:
        return self._progress.load()

    async def is_alive(self) -> bool:
        try:
            await self._llm.check_health()
        except EngineDeadError:
            return False
        return True

    async def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine has died, and `ReplicaUnusable` if it hangs.

        The processes of one that hangs are killed: then everything goes on as if it had died. Its generations fail at
        once and are made again at other replicas, and no process that is stopped outlives the replica.
        """
        await self._llm.check_health()
        ongoing = self._llm.get_num_unfinished_requests()
        is_paused = self.weights.is_paused or self.weights.is_held
        if self._watch.hangs(time.monotonic(), self._steps.taken, ongoing, is_paused):
            kill_child_processes()
            raise ReplicaUnusable("The engine has work and takes no step: its processes were killed.")

    def shutdown(self) -> None:
        if self.images is not None:
            self.images.close()
        self._llm.shutdown()


def served_names(config: ModelConfig) -> list[str]:
    """The names under which `GET /v1/models` lists the model, the first one being that in answers.

    vLLM names a model by its path where `served_model_name` is not set.
    """
    named = config.served_model_name
    return [public_model_name(name) for name in ([named] if isinstance(named, str) else named or [config.model])]


def _look_at_drafts(config: VllmConfig, is_asked: bool) -> None:
    """Logs what speculative decoding costs; raises `ValueError` if nobody asked for it.

    vLLM also drafts of itself, for checkpoints that name a model for it.
    """
    if (drafts := config.speculative_config) is None:
        return
    if not is_asked:
        raise ValueError(
            f"{config.model_config.model} names a model that drafts ({drafts.method}), which nobody asked for. Serve "
            "its target, or set engine.speculative_config."
        )
    methods = DRAFT_METHODS["cpu" if config.device_config.device_type == "cpu" else "gpu"]
    if drafts.method not in methods:
        raise ValueError(
            f"engine.speculative_config: vLLM makes {drafts.method!r} of it, which is none of the methods that are "
            f"exact there: {', '.join(methods)}."
        )
    costs = [] if config.scheduler_config.async_scheduling else ["the scheduler waits for each step"]
    if not config.use_v2_model_runner:
        costs.append("the engine takes vLLM's older model runner")
    logger.info("Tokens are drafted (%s)%s.", drafts.method, "".join(f"; {cost}" for cost in costs))


def _interrupted(failure: RolloutFailure | None) -> Generation:
    """A generation that was interrupted before its first token."""
    return Generation(packed_ids(()), packed_logprobs(()), "abort", failure=failure)


def _tokens_of(token_ids: Sequence[int], cache_salt: str | None = None) -> TokensInput:
    """The engine's input for a prompt without images.

    Args:
        cache_salt: the prefix cache is shared only with generations that have the same.
    """
    return tokens_input(list(token_ids), cache_salt=cache_salt)
