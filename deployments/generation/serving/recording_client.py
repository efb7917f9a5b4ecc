"""The engine as vLLM's serving layers call it: every call passes here, and what the engine makes is noted."""

import asyncio
from collections.abc import AsyncGenerator
from copy import copy
from dataclasses import replace
from typing import Any

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from deployments.failures import RolloutFailure
from deployments.generation.continued_completion import params_of_choice
from deployments.generation.engine import ALL_LOGPROBS, VLLMEngine
from deployments.generation.engine_outputs import ColumnReader
from deployments.generation.engine_requests import likeliest_tokens
from deployments.generation.serving.grammar_checks import GrammarChecks
from deployments.generation.serving.served_call import CURRENT_CALL, ServedCall, answered_failures, refusal_of
from deployments.protocols.generation import NO_COLUMNS, GenerationRequest
from deployments.rpc.background_tasks import BackgroundTasks
from deployments.upstream.vllm.token_texts import TEXTS_ARE_UNSEEN, skip_logprob_texts
from rollout_client.contract.messages import SampledWith
from rollout_client.contract.rollouts import Sampling

_NO_SAMPLING = frozenset({TEXTS_ARE_UNSEEN, "kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"})
"""Further arguments that move no token. Any other is one of a plugin of the engine, which may."""
_Output = RequestOutput | Exception | None
"""An item from the task that reads the engine: an output, a failure, or the end."""


class RecordingClient:
    """An `EngineClient`: has all that vLLM's `AsyncLLM` has, but generates through `VLLMEngine`.

    The engine is read by a task of its own. When an answer is not read to its end, because its caller has gone, that
    task interrupts the engine and takes what it has made, so that no token is lost.
    """

    def __init__(self, engine: VLLMEngine, grammars: GrammarChecks) -> None:
        self._engine = engine
        self._grammars = grammars
        self._tasks = BackgroundTasks()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.llm, name)

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,  # noqa: ARG002 - the engine has ids of its own
        *,
        lora_request: object = None,  # noqa: ARG002 - the policy of the call decides
        priority: int = 0,  # noqa: ARG002 - the ingress's scheduler decides
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        # Read here, because the generator's body runs later, maybe in another task, and vLLM calls this in the order
        # of the prompts.
        call = CURRENT_CALL.get()
        return self._outputs(call, call.begin_prompt(sampling_params.n), prompt, sampling_params, options)

    async def _outputs(
        self, call: ServedCall, first: int, prompt: Any, params: SamplingParams, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        outputs: asyncio.Queue[_Output] = asyncio.Queue()
        await self._check(call, params)
        if call.session is not None:
            with answered_failures():
                # Before the engine generates what nobody could record.
                call.session.refuse_unprepared()
            call.session.is_constrained = is_constrained(params)
            call.session.sampled_with = sampled_with(params, call.request.session_sampling)
            # Its caller is shown no more than it asked for.
            params = copy(params)
            _ask_for_logprobs(params)
        ended = call.engine_ended = asyncio.Event()
        request = call.generation(prompt["prompt_token_ids"], params.max_tokens, first)
        if request.include != NO_COLUMNS:
            call.columns = _ask_for_columns(params, request, self._engine.llm.model_config)
        reading = self._tasks.start(self._read(call, request, first, prompt, params, options, outputs, ended))
        try:
            while (output := await outputs.get()) is not None:
                if isinstance(output, Exception):
                    raise output
                yield output
        finally:
            if not reading.done():
                self._tasks.start(self._engine.interrupt([request.generation_id]))

    async def _read(
        self,
        call: ServedCall,
        request: GenerationRequest,
        first: int,
        prompt: Any,
        params: SamplingParams,
        options: dict[str, Any],
        outputs: "asyncio.Queue[_Output]",
        ended: asyncio.Event,
    ) -> None:
        """Reads all choices at the same time. If one fails, or the call may not go on, the others are aborted.

        Gives the outputs as vLLM's engine does: those of choices that are not streamed come together.

        Args:
            first: index of the first choice in the answer.
        """
        is_delta = params.output_kind == RequestOutputKind.DELTA
        whole: dict[int, RequestOutput] = {}

        def give(output: RequestOutput) -> None:
            call.note(output, is_delta, first)
            [completion] = output.outputs
            if output.finished:
                whole[completion.index] = output
            output.finished = len(whole) == params.n
            if output.finished and not is_delta:
                output.outputs = [ended_choice.outputs[0] for _, ended_choice in sorted(whole.items())]
            if output.finished or is_delta:
                outputs.put_nowait(output)

        async def read_choice(index: int) -> None:
            of_choice = params_of_choice(params, index)
            async for made in self._engine.completions.stream(request, prompt, of_choice, index, **options):
                _reject_unsatisfiable_schema(made, of_choice)
                give(made)

        reading = [asyncio.create_task(read_choice(index)) for index in range(params.n)]
        try:
            await asyncio.gather(*reading)
            outputs.put_nowait(None)
        except RolloutFailure as failure:
            call.note_failure(failure)
            outputs.put_nowait(refusal_of(failure))
        except Exception as error:  # noqa: BLE001 - vLLM's layers answer with it
            outputs.put_nowait(error)
        finally:
            for task in reading:
                task.cancel()
            await asyncio.wait(reading)
            ended.set()

    async def _check(self, call: ServedCall, params: SamplingParams) -> None:
        """Raises a failure for vLLM's layers if the engine should not compile the schema or grammar of the answer."""
        with answered_failures():
            try:
                await self._grammars.check(params)
            except RolloutFailure as failure:
                call.note_failure(failure)
                raise


def _ask_for_logprobs(params: SamplingParams) -> None:
    """Lets the engine give those of the sampled tokens, whatever the caller asked for, who is shown no more than that.

    Those of given ids are beside that of the sampled one, and vLLM takes no number beside them. Flat ones cost an
    engine less, but vLLM's answers cannot show those of prompts.
    """
    if params.logprobs is None and params.logprob_token_ids is None and params.prompt_logprobs is None:
        skip_logprob_texts(params)
    if params.logprob_token_ids is None:
        params.logprobs = params.logprobs or 0
    params.flat_logprobs = params.prompt_logprobs is None


def _ask_for_columns(params: SamplingParams, request: GenerationRequest, model: ModelConfig) -> ColumnReader:
    """Lets the engine give what the session includes, beside what `_ask_for_logprobs` has asked for."""
    asked = replace(request, sampling=replace(request.sampling, top_k=params.top_k))
    if params.logprobs is not None and params.logprobs != ALL_LOGPROBS:
        params.logprobs = max(params.logprobs, likeliest_tokens(asked))
    params.routed_experts_prompt_start = request.experts_from
    named = model.get_vocab_size() if params.logprobs == ALL_LOGPROBS else params.logprobs or 0
    return ColumnReader(asked, named, model.get_num_experts() if request.include.routed_experts else 0)


def _reject_unsatisfiable_schema(output: RequestOutput, params: SamplingParams) -> None:
    """Raises `VLLMValidationError` (400) if the engine has given up on a grammar or a JSON schema.

    It does where no token is allowed: `{"$ref": "#"}` passes vLLM's validation, and no text fits it. vLLM answers 500.
    """
    [completion] = output.outputs
    if completion.finish_reason == "error" and params.structured_outputs is not None:
        raise VLLMValidationError(
            "no further token fits the schema or grammar; give one that some text fits", parameter="structured_outputs"
        )


def is_constrained(params: SamplingParams) -> bool:
    """Whether something that the call asked for makes tokens more or less likely whatever the policy says.

    Temperature, top-p, top-k and min-p are the policy's own distribution. Stop texts, stop ids, `ignore_eos` and the
    detection of repetition say where a response ends, and not what is sampled.
    """
    wanted = params.structured_outputs
    return (
        (wanted is not None and not wanted.all_constraints_none())
        # Asked for, also if it moves nothing.
        or params.logit_bias is not None
        or params.allowed_token_ids is not None
        or bool(params.bad_words)
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
        or params.min_tokens > 0
        or params.thinking_token_budget is not None
        or params.trace_decode_token_ids is not None
        or bool(params.watermarking)
        or not (params.extra_args or {}).keys() <= _NO_SAMPLING
    )


def sampled_with(params: SamplingParams, session: Sampling | None) -> SampledWith | None:
    """The distribution that the call samples from, if it is not the one that its session says."""
    asked = session or Sampling()
    of_call = _distribution(params.temperature, params.top_p, params.top_k, params.min_p)
    temperature = 0.0 if asked.greedy else asked.temperature
    return None if of_call == _distribution(temperature, asked.top_p, asked.top_k, asked.min_p) else of_call


def _distribution(temperature: float, top_p: float, top_k: int, min_p: float) -> SampledWith:
    """Greedy decoding is the same whatever the others are."""
    if not temperature:
        return SampledWith(temperature=0.0)
    return SampledWith(temperature=temperature, top_p=top_p, top_k=max(top_k, 0), min_p=min_p)
