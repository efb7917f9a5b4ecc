"""One vLLM engine: token ids in, token ids and log-probabilities out. Knows no Ray."""

import asyncio
from typing import Any, Self

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError, VLLMServerError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from deployments.failures import GenerationLost, GenerationRejected, Overloaded
from deployments.protocols import Generation, GenerationRequest, GeneratorDescription, SamplingOptions, WeightSpan

INITIAL_WEIGHT_VERSION = "0"
WARM_UP_TOKENS = 8


class Engine:
    """Implements the `Generator` protocol on one `AsyncLLM`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    @classmethod
    async def start(cls, engine_args: dict[str, Any]) -> Self:
        """Loads the model and generates once, so that the first caller does not pay for warming up.

        Args:
            engine_args: fields of vLLM's `AsyncEngineArgs`; what vLLM refuses is raised as vLLM states it.
        """
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args, logprobs_mode="processed_logprobs"))
        engine = cls(llm)
        await llm.update_weight_version(INITIAL_WEIGHT_VERSION)
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
            GenerationLost: the engine broke, or somebody else aborted the request.
        """
        prompt = tokens_input(request.prompt_token_ids)
        try:
            async for output in self._llm.generate(prompt, sampling_params(request), request_id=request.request_id):
                completion = output.outputs[0]
        except VLLMClientError as error:
            raise GenerationRejected(f"The engine refused the generation: {error}") from error
        except (GracefulHTTPError, RetryableRequestError) as error:
            raise Overloaded(f"The engine could not take the generation: {error}") from error
        except VLLMServerError as error:
            raise GenerationLost(f"The engine failed during the generation: {error or type(error).__name__}") from error
        return generation_of(completion)

    def describe(self) -> GeneratorDescription:
        model = self._llm.model_config
        return GeneratorDescription(
            model=str(model.model), max_model_len=model.max_model_len, vocab_size=model.get_vocab_size()
        )

    @property
    def ongoing_generations(self) -> int:
        """Those that run or wait in the engine."""
        return self._llm.get_num_unfinished_requests()

    async def check_health(self) -> None:
        """Raises what killed the engine, if it is dead."""
        await self._llm.check_health()

    def shutdown(self) -> None:
        self._llm.shutdown()


def sampling_params(request: GenerationRequest) -> SamplingParams:
    options = request.sampling
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
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


def generation_of(completion: CompletionOutput) -> Generation:
    if completion.finish_reason not in ("stop", "length"):
        raise GenerationLost(f"The engine ended the generation early ({completion.finish_reason}).")
    token_ids = list(completion.token_ids)
    logprobs = list(completion.logprobs.logprobs) if isinstance(completion.logprobs, FlatLogprobs) else []
    if len(logprobs) != len(token_ids):
        raise GenerationLost(f"The engine gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens.")
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=completion.finish_reason,  # type: ignore[arg-type]
        weight_versions=tuple(
            WeightSpan(span.version, span.start, span.end) for span in completion.weight_versions or ()
        ),
    )
