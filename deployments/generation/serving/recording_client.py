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
from deployments.generation.engine_requests import likeliest_tokens
from deployments.generation.serving.grammar_checks import GrammarChecks
from deployments.generation.serving.refusals import answered_failures, refusal_of
from deployments.generation.serving.sampling_marks import is_constrained, sampled_with
from deployments.generation.serving.served_call import CURRENT_CALL, ColumnReader, ServedCall
from deployments.protocols.generation import NO_COLUMNS, GenerationRequest
from deployments.rpc.background_tasks import BackgroundTasks
from deployments.upstream.vllm.token_texts import skip_logprob_texts

Output = RequestOutput | Exception | None
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
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        await self._check(call, params)
        if call.session is not None:
            with answered_failures():
                # Before the engine generates what nobody could record.
                call.session.refuse_unprepared()
            call.is_constrained = is_constrained(params)
            call.sampled_with = sampled_with(params, call.request.session_sampling)
            # Its caller is shown no more than it asked for.
            params = copy(params)
            ask_for_logprobs(params)
        ended = call.engine_ended = asyncio.Event()
        choices = WholeChoices(params.n, params.output_kind == RequestOutputKind.DELTA, first)
        request = call.generation(prompt["prompt_token_ids"], params.max_tokens, first)
        if request.include != NO_COLUMNS:
            call.columns = ask_for_columns(params, request, self._engine.llm.model_config)
        reading = self._tasks.start(self._read(call, request, choices, prompt, params, options, outputs, ended))
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
        choices: "WholeChoices",
        prompt: Any,
        params: SamplingParams,
        options: dict[str, Any],
        outputs: "asyncio.Queue[Output]",
        ended: asyncio.Event,
    ) -> None:
        """Reads all choices at the same time. If one fails, or the call may not go on, the others are aborted."""

        async def read_choice(index: int, equal: range) -> None:
            of_choice = params_of_choice(params, index)
            async for made in self._engine.completions.stream(request, prompt, of_choice, index, **options):
                reject_unsatisfiable_schema(made, of_choice)
                for output in for_each(made, equal):
                    call.note(output, choices.is_delta, choices.first)
                    if (whole := choices.add(output)) is not None:
                        outputs.put_nowait(whole)

        # Nothing is drawn at temperature 0: one choice stands for all.
        step = params.n if params.temperature == 0 else 1
        reading = [
            asyncio.create_task(read_choice(index, range(index, index + step))) for index in range(0, params.n, step)
        ]
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


def for_each(output: RequestOutput, choices: range) -> list[RequestOutput]:
    """The output of the first of these choices as those of all of them."""
    [completion] = output.outputs
    copies = [copy(output) for _ in choices[1:]]
    for index, of_choice in zip(choices[1:], copies, strict=True):
        of_choice.outputs = [replace(completion, index=index)]
    return [output, *copies]


class WholeChoices:
    """The outputs of the choices of one prompt as vLLM's engine gives them: those that are not streamed together."""

    def __init__(self, count: int, is_delta: bool, first: int) -> None:
        self.is_delta = is_delta
        """Whether each output has only the tokens since the one before."""
        self.first = first
        """Index of the first choice in the answer."""
        self._count = count
        self._ended: dict[int, RequestOutput] = {}

    def add(self, output: RequestOutput) -> RequestOutput | None:
        """Returns what the caller gets now."""
        [completion] = output.outputs
        if output.finished:
            self._ended[completion.index] = output
        output.finished = len(self._ended) == self._count
        if self.is_delta:
            return output
        if not output.finished:
            return None
        output.outputs = [ended.outputs[0] for _, ended in sorted(self._ended.items())]
        return output


def ask_for_logprobs(params: SamplingParams) -> None:
    """Lets the engine give those of the sampled tokens, whatever the caller asked for, who is shown no more than that.

    Those of given ids are beside that of the sampled one, and vLLM takes no number beside them. Flat ones cost an
    engine less, but vLLM's answers cannot show those of prompts.
    """
    if params.logprobs is None and params.logprob_token_ids is None and params.prompt_logprobs is None:
        skip_logprob_texts(params)
    if params.logprob_token_ids is None:
        params.logprobs = params.logprobs or 0
    params.flat_logprobs = params.prompt_logprobs is None


def ask_for_columns(params: SamplingParams, request: GenerationRequest, model: ModelConfig) -> ColumnReader:
    """Lets the engine give what the session includes, beside what `ask_for_logprobs` has asked for."""
    asked = replace(request, sampling=replace(request.sampling, top_k=params.top_k))
    if params.logprobs is not None and params.logprobs != ALL_LOGPROBS:
        params.logprobs = max(params.logprobs, likeliest_tokens(asked))
    params.routed_experts_prompt_start = request.experts_from
    named = model.get_vocab_size() if params.logprobs == ALL_LOGPROBS else params.logprobs or 0
    return ColumnReader(asked, named, model.get_num_experts() if request.include.routed_experts else 0)


def reject_unsatisfiable_schema(output: RequestOutput, params: SamplingParams) -> None:
    """Raises `VLLMValidationError` (400) if the engine has given up on a grammar or a JSON schema.

    It does where no token is allowed: `{"$ref": "#"}` passes vLLM's validation, and no text fits it. vLLM answers 500.
    """
    [completion] = output.outputs
    if completion.finish_reason == "error" and params.structured_outputs is not None:
        raise VLLMValidationError(
            "no further token fits the schema or grammar; give one that some text fits", parameter="structured_outputs"
        )
