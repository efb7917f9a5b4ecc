"""One vLLM engine: token ids in, token ids and log-probabilities out. Knows no Ray."""

import asyncio
import logging
import time
from typing import Any, Self

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.envs import enable_envs_cache
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError, VLLMServerError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

from deployments.failures import GenerationCut, GenerationLost, GenerationRejected, Overloaded, RolloutFailure
from deployments.generation.adapters import Adapters
from deployments.generation.weight_updater import WeightUpdater
from deployments.protocols import (
    Engine,
    Generation,
    GenerationRequest,
    GeneratorDescription,
    PrefixCacheTokens,
    ReplicaLoad,
    SamplingOptions,
    WeightSpan,
    packed_ids,
    packed_logprobs,
)

WARM_UP_TOKENS = 8
COUNT_LOAD_EVERY_S = 0.1
"""Counting takes a microsecond for each ongoing generation, and every answer carries the load."""
WORKER_EXTENSION = "deployments.generation.worker_extension.WeightsWorkerExtension"
logger = logging.getLogger("rollout_service.generation")


class VLLMEngine(Engine):
    """Generates on one `AsyncLLM`; `weights` changes what it generates with."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._adapters = Adapters(llm)
        self.weights = WeightUpdater(llm, self._adapters)
        self._death_is_logged = False
        self._count_load_at = 0.0
        self._waiting = 0
        self._kv_tokens = 0

    @classmethod
    async def start(cls, engine_args: dict[str, Any]) -> Self:
        """Loads the model and generates once, so that no caller waits for the warm-up.

        Args:
            engine_args: fields of vLLM's `AsyncEngineArgs`.

        Raises:
            Exception: what vLLM raises for arguments that it refuses.
            ValueError: vLLM has no weight transfer backend of the given name.
        """
        args = AsyncEngineArgs(**engine_args, logprobs_mode="processed_logprobs", worker_extension_cls=WORKER_EXTENSION)
        refuse_unknown_backend(args)
        llm = AsyncLLM.from_engine_args(args)
        enable_envs_cache()
        engine = cls(llm)
        await engine.weights.label_initial_weights()
        await asyncio.gather(*(engine.generate(request) for request in warm_up_requests()))
        return engine

    async def generate(self, request: GenerationRequest) -> Generation:
        """Runs one generation; cancelling the call aborts it in the engine. Failures are logged.

        Raises:
            GenerationRejected: the engine refuses the request as it is.
            Overloaded: the engine's queue is full.
            GenerationCut: an update of the weights aborted it.
            GenerationLost: the engine broke, or the request was aborted by another caller.
        """
        try:
            return await self._generate(request)
        except RolloutFailure as failure:
            self._log(failure, request)
            raise

    async def _generate(self, request: GenerationRequest) -> Generation:
        prompt = tokens_input(list(request.prompt_token_ids))
        await self.weights.may_generate.wait()
        adapter, aborts = self._adapters.current, self.weights.aborts
        try:
            with self._adapters.used_by_generation(adapter):
                async for output in self._llm.generate(
                    prompt, sampling_params(request), request_id=request.generation_id, lora_request=adapter
                ):
                    completion = output.outputs[0]
        except VLLMClientError as error:
            raise GenerationRejected(f"The engine refused the generation: {error}") from error
        except (GracefulHTTPError, RetryableRequestError) as error:
            raise Overloaded(f"The engine could not accept the generation: {error}") from error
        except VLLMServerError as error:
            raise GenerationLost(f"The engine failed during the generation: {error or type(error).__name__}") from error
        if completion.finish_reason == "abort" and aborts != self.weights.aborts:
            raise GenerationCut("An update of the weights cut the generation.")
        return generation_of(completion, None if adapter is None else adapter.lora_int_id)

    def describe(self) -> GeneratorDescription:
        model = self._llm.model_config
        return GeneratorDescription(
            model=str(model.model), max_model_len=model.max_model_len, vocab_size=model.get_vocab_size()
        )

    def prefix_cache_tokens(self) -> PrefixCacheTokens:
        """From vLLM's own counters."""
        counted = {metric.name: metric.value for metric in get_metrics_snapshot() if isinstance(metric, Counter)}
        return PrefixCacheTokens(counted["vllm:prefix_cache_queries"], counted["vllm:prefix_cache_hits"])

    def load(self) -> ReplicaLoad:
        """Tokens and waiting generations are counted at most every `COUNT_LOAD_EVERY_S` seconds."""
        now = time.monotonic()
        if now >= self._count_load_at:
            self._count_load_at = now + COUNT_LOAD_EVERY_S
            states = self._llm.output_processor.request_states.values()
            self._waiting = sum(state.is_prefilling for state in states)
            self._kv_tokens = sum(state.prompt_len + output_tokens(state) for state in states)
        return ReplicaLoad(self._llm.get_num_unfinished_requests(), self._waiting, self._kv_tokens)

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
        self._llm.shutdown()

    def _log(self, failure: RolloutFailure, request: GenerationRequest) -> None:
        about = {
            "request_id": request.request_id,
            "rollout_id": request.rollout_id,
            "generation_id": request.generation_id,
        }
        if isinstance(failure, GenerationCut | Overloaded):
            logger.info("%s", failure, extra=about)
        elif isinstance(failure.__cause__, EngineDeadError):
            self._log_death(failure.__cause__)
            logger.warning("%s", failure, extra=about)
        else:
            logger.warning("%s", failure, exc_info=failure, extra=about)

    def _log_death(self, error: EngineDeadError) -> None:
        """Only once: hundreds of generations fail with the engine."""
        if not self._death_is_logged:
            self._death_is_logged = True
            logger.error("The engine died; Serve replaces the replica.", exc_info=error)


def output_tokens(state: RequestState) -> int:
    return 0 if state.detokenizer is None else state.detokenizer.num_output_tokens()


def warm_up_requests() -> list[GenerationRequest]:
    """With and without stop strings, because vLLM detokenizes only with them."""
    return [
        GenerationRequest(f"warm-up-{number}", [0], WARM_UP_TOKENS, stop_strings, SamplingOptions())
        for number, stop_strings in enumerate(((), ("never",)))
    ]


def refuse_unknown_backend(args: AsyncEngineArgs) -> None:
    """Raises `ValueError` with the backends that exist; vLLM itself fails later, in a worker process."""
    backends = WeightTransferEngineFactory._registry.keys()
    if args.weight_transfer_config is not None and args.weight_transfer_config.backend not in backends:
        raise ValueError(
            f"engine.weight_transfer_config.backend: {args.weight_transfer_config.backend!r} does not exist; "
            f"vLLM has {', '.join(sorted(backends))}"
        )


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
        # vLLM finds stop strings in the text. Without them the ingress detokenizes, once per message.
        detokenize=bool(request.stop_strings),
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def generation_of(completion: CompletionOutput, adapter_version: int | None) -> Generation:
    """The generation as the loop takes it; with an adapter, all its tokens are labelled with the adapter's version.

    vLLM's own spans name only full weights.

    Raises:
        GenerationLost: the engine did not end it by a stop or by length, or its log-probabilities are incomplete.
    """
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
