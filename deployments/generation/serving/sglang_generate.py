"""SGLang's `/generate` over the engine, as trainers that were written for SGLang call it.

Prompts and sampled tokens are ids; the answer has SGLang's fields (`meta_info`), with the log-probabilities of the
distribution that was sampled from, and says which weights made which tokens. Events of a stream are cumulative, as
SGLang's are by default.
"""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response, StreamingResponse
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.serve.utils.api_utils import validate_json_request, with_cancellation
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.utils.async_utils import merge_async_iterators

from deployments.generation.serving.answered_layers import record, refuse_without_columns, versions_of
from deployments.generation.serving.call_aborts import AbortableCall, CallAborts
from deployments.generation.serving.refusals import answered_failures
from deployments.generation.serving.served_call import CURRENT_CALL, GeneratedChoice, ServedCall
from deployments.generation.serving.session_call import DATA, DONE
from deployments.generation.serving.sglang_requests import (
    NO_INPUT_LOGPROBS,
    AskedPrompt,
    SGLangRequest,
    asked_prompts,
    params_of,
)

JSON = "application/json"
EVENTS = "text/event-stream"
EVENT_EVERY_S = 0.05
"""An event has all tokens so far: one for each token would make a long answer's stream quadratic in its length."""
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""
TokenLogprob = tuple[float | None, int, str | None]
"""The log-probability of a token, its id, and its text where texts are asked for: an entry of SGLang's lists."""


@dataclass(slots=True, eq=False)
class PromptAnswer:
    """The answer to one prompt, as far as the engine's outputs have come."""

    asked: AskedPrompt
    prompt_token_ids: Sequence[int]
    call: ServedCall
    first: int
    """Index of its first choice in the answer."""
    text_of: Callable[[int], str | None]
    """The text of a token; `None` where none are asked for."""
    version: str
    """The weights with which it begins."""
    texts: list[str] = field(init=False)
    """By choice."""
    stop_reasons: list[int | str | None] = field(init=False)
    top_logprobs: list[list[list[TokenLogprob]]] = field(init=False)
    prompt_logprobs: list[Any] = field(default_factory=list)
    """vLLM's, a mapping for each token but the first."""
    cached_tokens: int = 0
    last_event_at: float = 0.0

    def __post_init__(self) -> None:
        count = self.asked.sampling.n
        self.texts, self.stop_reasons = [""] * count, [None] * count
        self.top_logprobs = [[] for _ in range(count)]

    def add(self, output: RequestOutput, is_delta: bool) -> list[int]:
        """Takes an output of the engine. Returns the choices in it."""
        self.prompt_logprobs = list(output.prompt_logprobs or self.prompt_logprobs)
        self.cached_tokens = output.num_cached_tokens or self.cached_tokens
        for completion in output.outputs:
            place = completion.index
            self.texts[place] = self.texts[place] + completion.text if is_delta else completion.text
            if completion.finished():
                self.stop_reasons[place] = completion.stop_reason
            if self.asked.top_logprobs and completion.logprobs is not None:
                self.top_logprobs[place] += [self._likeliest(one) for one in shown_positions(completion)]
        return [completion.index for completion in output.outputs]

    def is_finished(self, place: int) -> bool:
        return self._choice(place).finish_reason is not None

    def choice(self, place: int) -> dict[str, Any]:
        """One choice as SGLang's server answers it."""
        choice, generates = self._choice(place), self.asked.generates
        token_ids = list(choice.token_ids) if generates else []
        spans = versions_of(self.call, self.first + place) if generates else []
        meta: dict[str, Any] = {
            "id": self.asked.rid,
            "finish_reason": self._finish_reason(place),
            "prompt_tokens": len(self.prompt_token_ids),
            "weight_version": spans[-1]["version"] if spans else self.version,
            "weight_versions": spans,
            "completion_tokens": len(token_ids),
            "cached_tokens": self.cached_tokens,
        }
        if self.call.session is not None:
            name = self.call.session.answer_id
            meta["generation_id"] = f"{name}-{place}" if self.asked.sampling.n > 1 else name
        if self.asked.shows_logprobs:
            logprobs = choice.logprobs if generates else ()
            shown = zip(logprobs, token_ids, strict=True)
            meta["output_token_logprobs"] = [self._entry(logprob, token_id) for logprob, token_id in shown]
            meta["output_token_logprobs_length"] = len(token_ids)
            meta |= self._of_prompt()
            if self.asked.top_logprobs:
                meta["output_top_logprobs"] = self.top_logprobs[place] if generates else []
        return {"text": self.texts[place] if generates else "", "output_ids": token_ids, "meta_info": meta}

    def _choice(self, place: int) -> GeneratedChoice:
        return self.call.choices.get(self.first + place) or GeneratedChoice()

    def _finish_reason(self, place: int) -> dict[str, Any] | None:
        choice, stop_reason = self._choice(place), self.stop_reasons[place]
        match choice.finish_reason:
            case None:
                return None
            case "abort":
                return aborted()
            case _ if not self.asked.generates:
                return {"type": "length", "length": 0}
            case "stop":
                return {"type": "stop", "matched": choice.token_ids[-1] if stop_reason is None else stop_reason}
            case reason:
                return {"type": reason, "length": len(choice.token_ids)}

    def _of_prompt(self) -> dict[str, Any]:
        """The log-probabilities of the prompt. The first one is null, wherever they begin."""
        start = self.asked.logprobs_from
        if start == NO_INPUT_LOGPROBS:
            return {"input_token_logprobs": []}
        ids, positions = self.prompt_token_ids[start:], self.prompt_logprobs[start + 1 :]
        following = zip(positions, ids[1:], strict=False)
        scored = [self._entry(position[token_id].logprob, token_id) for position, token_id in following]
        first = [self._entry(None, token_id) for token_id in ids[:1]]
        shown: dict[str, Any] = {"input_token_logprobs": [*first, *scored]}
        if self.asked.top_logprobs:
            shown["input_top_logprobs"] = [*[None for _ in first], *map(self._likeliest, positions)]
        return shown

    def _likeliest(self, position: Any) -> list[TokenLogprob]:
        ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
        return [self._entry(one.logprob, token_id) for token_id, one in ranked[: self.asked.top_logprobs]]

    def _entry(self, logprob: float | None, token_id: int) -> TokenLogprob:
        return None if logprob is None else max(logprob, LEAST_LOGPROB), token_id, self.text_of(token_id)


def shown_positions(completion: CompletionOutput) -> Sequence[Any]:
    """Those of the tokens that the output has, each with the log-probabilities that vLLM names."""
    assert completion.logprobs is not None
    return [completion.logprobs[place] for place in range(len(completion.token_ids))]


def aborted() -> dict[str, Any]:
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


class AnsweredGenerate(GenerateBaseServing):
    """Answers calls of `/generate`, with the prompts of each in their order."""

    def __init__(
        self,
        engine: Any,
        models: Any,
        renderer: Any,
        aborts: CallAborts,
        current_version: Callable[[str | None], str],
    ) -> None:
        """Builds on vLLM's own layers.

        Args:
            engine: the `RecordingClient`.
            renderer: vLLM's, which tokenizes texts.
            current_version: the label of the weights with which a policy generates now.
        """
        super().__init__(engine, models, request_logger=None)
        self._renderer = renderer
        self._aborts = aborts
        self._current_version = current_version

    async def answer(self, request: SGLangRequest) -> Response:
        """Raises what vLLM's error handlers answer."""
        call = CURRENT_CALL.get()
        self._preflight()
        prompts, asked = request.prompts, asked_prompts(request, call.request.generation_id)
        if request.text is None and any(min(ids) < 0 for ids in prompts):
            raise VLLMValidationError("A token id is negative.", parameter="input_ids")
        inputs = await self._renderer.preprocess_completion(
            request, prompt_input=prompts, prompt_embeds=None, skip_mm_cache=True
        )
        if call.session is not None:
            await prepare_session(call, asked, [one["prompt_token_ids"] for one in inputs], request.stream)
        answers, outputs = self._start(request, asked, inputs, call)
        if request.stream:
            events = self._events(request, answers, outputs, call)
            return StreamingResponse(events, media_type=EVENTS)
        async with aclosing(outputs):
            async for place, output in outputs:
                self._refuse_failed(output)
                answers[place].add(output, is_delta=False)
        if call.session is not None:
            await record(call.session, {})
        choices = [answer.choice(place) for answer in answers for place in range(answer.asked.sampling.n)]
        is_single = request.is_single and len(choices) == 1
        return Response(orjson.dumps(choices[0] if is_single else choices), HTTPStatus.OK, media_type=JSON)

    def _start(
        self, request: SGLangRequest, asked: Sequence[AskedPrompt], inputs: Sequence[Any], call: ServedCall
    ) -> tuple[list[PromptAnswer], AsyncGenerator[tuple[int, RequestOutput], None]]:
        """The answers, without anything yet, and the outputs that make them, each with the place of its prompt."""
        answers: list[PromptAnswer] = []
        running: list[AsyncGenerator[RequestOutput, None]] = []
        text_of = self._decoded if request.return_text_in_logprobs else no_text
        version = self._current_version(call.request.policy)
        for one, engine_input in zip(asked, inputs, strict=True):
            ids = engine_input["prompt_token_ids"]
            params = params_of(one, ids, call, self.model_config.max_model_len, request.stream)
            if call.session is not None:
                refuse_without_columns(params, call, self.model_config.max_logprobs)
            first = len(answers) * params.n
            abortable = AbortableCall(call.request, one.rid, call.generation_id(first))
            answers.append(PromptAnswer(one, ids, call, first, text_of, version))
            if self._aborts.is_aborted(abortable):
                call.begin_prompt(params.n)
                running.append(aborted_at_once(call, first, params.n))
            else:
                outputs = self.engine_client.generate(engine_input, params, call.generation_id(first))
                running.append(abortable_outputs(self._aborts, abortable, outputs))
        return answers, merge_async_iterators(*running)

    async def _events(
        self,
        request: SGLangRequest,
        answers: Sequence[PromptAnswer],
        outputs: AsyncGenerator[tuple[int, RequestOutput], None],
        call: ServedCall,
    ) -> AsyncGenerator[str, None]:
        """The events of a stream. In a session those that end a choice wait until the call is recorded."""
        held: list[str] = []
        is_single = request.is_single and len(answers) == 1 and answers[0].asked.sampling.n == 1
        try:
            async with aclosing(outputs):
                async for number, output in outputs:
                    self._refuse_failed(output)
                    answer = answers[number]
                    for place in answer.add(output, is_delta=True):
                        ends = answer.is_finished(place)
                        if not ends and time.monotonic() - answer.last_event_at < EVENT_EVERY_S:
                            continue
                        answer.last_event_at = time.monotonic()
                        choice = answer.choice(place)
                        if not is_single:
                            choice["index"] = answer.first + place
                        event = f"{DATA}{orjson.dumps(choice).decode()}\n\n"
                        if ends and call.session is not None:
                            held.append(event)
                        else:
                            yield event
            if call.session is not None:
                await record(call.session, {})
            for event in held:
                yield event
        except VLLMError as error:
            yield f"{DATA}{self.create_streaming_error_response(error)}\n\n"
        yield f"{DATA}{DONE}\n\n"

    def _refuse_failed(self, output: RequestOutput) -> None:
        """Raises vLLM's `GenerationError` if the engine has failed in the middle of it."""
        for completion in output.outputs:
            self._raise_if_error(completion.finish_reason, output.request_id)

    def _decoded(self, token_id: int) -> str:
        text: str = self.renderer.get_tokenizer().decode([token_id])
        return text


def no_text(_token_id: int) -> None:
    """No text is shown."""


async def prepare_session(
    call: ServedCall, asked: Sequence[AskedPrompt], prompts: Sequence[Sequence[int]], is_streamed: bool
) -> None:
    """Begins a call of a session. Raises `VLLMValidationError`, or what `SessionCall.prepare_tokens` does, answered."""
    assert call.session is not None
    if len(prompts) > 1:
        raise VLLMValidationError("A session records one prompt a call: send them one by one.", parameter="input_ids")
    if not asked[0].generates:
        message = "A session records what is generated: send a `max_new_tokens` of at least 1."
        raise VLLMValidationError(message, parameter="max_new_tokens")
    with answered_failures():
        await call.session.prepare_tokens(prompts[0], is_streamed)


async def abortable_outputs(
    aborts: CallAborts, call: AbortableCall, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncGenerator[RequestOutput, None]:
    with aborts.running(call):
        async with aclosing(outputs):
            async for output in outputs:
                yield output


async def aborted_at_once(call: ServedCall, first: int, choices: int) -> AsyncGenerator[RequestOutput, None]:
    """The output of a prompt that was aborted before the engine had it."""
    made = [
        CompletionOutput(place, "", [], cumulative_logprob=None, logprobs=None, finish_reason="abort")
        for place in range(choices)
    ]
    output = RequestOutput(call.generation_id(first), None, [], None, made, finished=True)
    call.note(output, is_delta=False, first=first)
    yield output


async def generate(request: SGLangRequest, raw_request: Request) -> Response:
    layer: AnsweredGenerate = raw_request.app.state.answered_generate
    return await layer.answer(request)


router = APIRouter()
router.add_api_route(
    "/generate",
    with_cancellation(generate),  # type: ignore[no-untyped-call]
    methods=["POST"],
    dependencies=[Depends(validate_json_request)],
)
