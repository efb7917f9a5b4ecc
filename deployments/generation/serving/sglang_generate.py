"""SGLang's `/generate` over the engine, as trainers that were written for SGLang call it.

Prompts and sampled tokens are ids; the answer has SGLang's fields (`meta_info`), with the log-probabilities of the
distribution that was sampled from, and says which weights made which tokens. Events of a stream are cumulative, as
SGLang's are by default; the log-probabilities of a prompt are in those that end a choice.
"""

import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import orjson
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.utils.async_utils import merge_async_iterators

from deployments.generation.engine_outputs import GeneratedChoice
from deployments.generation.serving.answered_layers import refuse_without_columns, versions_of
from deployments.generation.serving.call_aborts import AbortableCall, CallAborts
from deployments.generation.serving.served_call import CURRENT_CALL, ServedCall, answered_failures
from deployments.generation.serving.session_call import DATA, DONE
from deployments.generation.serving.sglang_requests import NO_INPUT_LOGPROBS, SGLangRequest, params_of

EVENT_EVERY_S = 0.05
TOKENS_OF_EVENT = 2000
"""An event has all tokens so far: one for each token would make a long answer's stream quadratic in its length. Events
with more tokens than this are rarer in the same measure, so that no stream holds the replica for more than a small
share of its time."""
_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""
_TokenLogprob = tuple[float | None, int, str | None]
"""The log-probability of a token, its id, and its text where texts are asked for: an entry of SGLang's lists."""


@dataclass(eq=False)
class PromptAnswer:
    """The answer to one prompt, as far as the engine's outputs have come."""

    request: SGLangRequest
    rid: str
    prompt_token_ids: Sequence[int]
    call: ServedCall
    first: int
    """Index of its first choice in the answer."""
    text_of: Callable[[int], str | None]
    """The text of a token; `None` where none are asked for."""
    version: str
    """The weights with which it begins."""
    texts: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The parts of each choice's text."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Tokens of each choice: the call may have more of them already."""
    stop_reasons: dict[int, int | str | None] = field(default_factory=dict)
    """By choice that has ended."""
    prompt_logprobs: Sequence[Any] = ()
    """vLLM's, a mapping for each token but the first."""
    cached_tokens: int = 0
    next_event_at: float = 0.0

    def add(self, output: RequestOutput) -> list[int]:
        """Takes an output of the engine, with the tokens since the one before. Returns the choices in it."""
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        self.cached_tokens = output.num_cached_tokens or self.cached_tokens
        for completion in output.outputs:
            self.texts[completion.index].append(completion.text)
            self.lengths[completion.index] += len(completion.token_ids)
            if completion.finished():
                self.stop_reasons[completion.index] = completion.stop_reason
        return [completion.index for completion in output.outputs]

    def choice(self, place: int) -> dict[str, Any]:
        """One choice as SGLang's server answers it. Until it has ended it is without what its prompt has in numbers."""
        several = self.request.sampling_params.n > 1
        choice, generates = self._choice(place), self.request.generates
        token_ids = list(choice.token_ids[: self.lengths[place]]) if generates else []
        spans = _cut_versions(versions_of(self.call, self.first + place), len(token_ids)) if generates else []
        meta: dict[str, Any] = {
            "id": f"{self.rid}_{place}" if several else self.rid,
            "finish_reason": self._finish_reason(place),
            "prompt_tokens": len(self.prompt_token_ids),
            "weight_version": spans[-1]["version"] if spans else self.version,
            "weight_versions": spans,
            "completion_tokens": len(token_ids),
            "cached_tokens": self.cached_tokens,
        }
        if self.call.session is not None:
            name = self.call.session.answer_id
            meta["generation_id"] = f"{name}-{place}" if several else name
        if self.request.return_logprob:
            shown = zip(choice.logprobs[: len(token_ids)], token_ids, strict=True)
            meta["output_token_logprobs"] = [self._entry(logprob, token_id) for logprob, token_id in shown]
            meta["output_token_logprobs_length"] = len(token_ids)
            if place in self.stop_reasons:
                meta["input_token_logprobs"] = self._of_prompt
        return {"text": "".join(self.texts[place]) if generates else "", "output_ids": token_ids, "meta_info": meta}

    def _choice(self, place: int) -> GeneratedChoice:
        return self.call.choices.get(self.first + place) or GeneratedChoice()

    def _finish_reason(self, place: int) -> dict[str, Any] | None:
        choice, stop_reason = self._choice(place), self.stop_reasons.get(place)
        match choice.finish_reason if place in self.stop_reasons else None:
            case None:
                return None
            case "abort":
                return _aborted()
            case _ if not self.request.generates:
                return {"type": "length", "length": 0}
            case "stop":
                return {"type": "stop", "matched": choice.token_ids[-1] if stop_reason is None else stop_reason}
            case reason:
                return {"type": reason, "length": len(choice.token_ids)}

    @cached_property
    def _of_prompt(self) -> orjson.Fragment:
        """The log-probabilities of the prompt. The first one is null, wherever they begin."""
        return orjson.Fragment(orjson.dumps(self._prompt_numbers()))

    def _prompt_numbers(self) -> list[_TokenLogprob]:
        start = self.request.logprob_start_len
        if start == NO_INPUT_LOGPROBS:
            return []
        ids, positions = self.prompt_token_ids[start:], self.prompt_logprobs[start + 1 :]
        following = zip(positions, ids[1:], strict=False)
        scored = [self._entry(position[token_id].logprob, token_id) for position, token_id in following]
        first = [self._entry(None, token_id) for token_id in ids[:1]]
        return [*first, *scored]

    def _entry(self, logprob: float | None, token_id: int) -> _TokenLogprob:
        return None if logprob is None else max(logprob, _LEAST_LOGPROB), token_id, self.text_of(token_id)


def _cut_versions(spans: Sequence[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Those of the first `tokens`."""
    return [span | {"end": min(span["end"], tokens)} for span in spans if span["start"] < max(tokens, 1)]


def _aborted() -> dict[str, Any]:
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

    async def answer(self, request: SGLangRequest, _raw_request: object) -> bytes | AsyncGenerator[str, None]:
        """Returns an answer in JSON, or the events of a stream. Raises what becomes an answer of vLLM's servers."""
        call = CURRENT_CALL.get()
        self._preflight()
        prompts = request.prompts
        if request.text is None and any(min(ids) < 0 for ids in prompts):
            raise VLLMValidationError("A token id is negative.", parameter="input_ids")
        inputs = await self._renderer.preprocess_completion(
            request, prompt_input=prompts, prompt_embeds=None, skip_mm_cache=True
        )
        if call.session is not None:
            await _prepare_session(call, request, [one["prompt_token_ids"] for one in inputs])
        answers, outputs = self._start(request, inputs, call)
        if request.stream:
            return self._events(request, answers, outputs, call)
        async with aclosing(outputs):
            async for place, output in outputs:
                self._refuse_failed(output)
                answers[place].add(output)
        await call.record({})
        choices = [answer.choice(place) for answer in answers for place in range(request.sampling_params.n)]
        is_single = request.is_single and len(choices) == 1
        return orjson.dumps(choices[0] if is_single else choices)

    def _start(
        self, request: SGLangRequest, inputs: Sequence[Any], call: ServedCall
    ) -> tuple[list[PromptAnswer], AsyncGenerator[tuple[int, RequestOutput], None]]:
        """The answers, without anything yet, and the outputs that make them, each with the place of its prompt."""
        answers: list[PromptAnswer] = []
        running: list[AsyncGenerator[RequestOutput, None]] = []
        # The same tokens are named again and again.
        tokenizer = self.renderer.get_tokenizer()
        text_of = cache(lambda token_id: tokenizer.decode([token_id])) if request.return_text_in_logprobs else _no_text
        version = self._current_version(call.request.policy)
        rid = request.rid or call.request.generation_id
        for number, engine_input in enumerate(inputs):
            ids = engine_input["prompt_token_ids"]
            params = params_of(request, ids, call, self.model_config.max_model_len)
            if call.session is not None:
                refuse_without_columns(params, call, self.model_config.max_logprobs)
            first = number * params.n
            answer = PromptAnswer(
                request, rid if request.is_single else f"{rid}_{number}", ids, call, first, text_of, version
            )
            answers.append(answer)
            abortable = AbortableCall(call.request, answer.rid, call.generation_id(first))
            if self._aborts.is_aborted(abortable):
                call.begin_prompt(params.n)
                running.append(_aborted_at_once(call, first, params.n))
            else:
                outputs = self.engine_client.generate(engine_input, params, call.generation_id(first))
                running.append(_abortable_outputs(self._aborts, abortable, outputs))
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
        is_single = request.is_single and request.sampling_params.n == 1
        try:
            async with aclosing(outputs):
                async for number, output in outputs:
                    self._refuse_failed(output)
                    answer = answers[number]
                    for place in answer.add(output):
                        ends, now = place in answer.stop_reasons, time.monotonic()
                        if not ends and now < answer.next_event_at:
                            continue
                        answer.next_event_at = now + EVENT_EVERY_S * max(answer.lengths[place] / TOKENS_OF_EVENT, 1)
                        choice = answer.choice(place)
                        if not is_single:
                            choice["index"] = answer.first + place
                        event = f"{DATA}{orjson.dumps(choice).decode()}\n\n"
                        if ends and call.session is not None:
                            held.append(event)
                        else:
                            yield event
            await call.record({})
            for event in held:
                yield event
        except VLLMError as error:
            yield f"{DATA}{self.create_streaming_error_response(error)}\n\n"
        yield f"{DATA}{DONE}\n\n"

    def _refuse_failed(self, output: RequestOutput) -> None:
        """Raises vLLM's `GenerationError` if the engine has failed in the middle of it."""
        for completion in output.outputs:
            self._raise_if_error(completion.finish_reason, output.request_id)


def _no_text(_token_id: int) -> None:
    """No text is shown."""


async def _prepare_session(call: ServedCall, request: SGLangRequest, prompts: Sequence[Sequence[int]]) -> None:
    """Begins a call of a session. Raises `VLLMValidationError`, or what `SessionCall.prepare_tokens` does, answered."""
    assert call.session is not None
    if len(prompts) > 1:
        raise VLLMValidationError("A session records one prompt a call: send them one by one.", parameter="input_ids")
    if not request.generates:
        message = "A session records what is generated: send a `max_new_tokens` of at least 1."
        raise VLLMValidationError(message, parameter="max_new_tokens")
    with answered_failures():
        await call.session.prepare_tokens(prompts[0])


async def _abortable_outputs(
    aborts: CallAborts, call: AbortableCall, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncGenerator[RequestOutput, None]:
    with aborts.running(call):
        async with aclosing(outputs):
            async for output in outputs:
                yield output


async def _aborted_at_once(call: ServedCall, first: int, choices: int) -> AsyncGenerator[RequestOutput, None]:
    """The output of a prompt that was aborted before the engine had it."""
    made = [
        CompletionOutput(place, "", [], cumulative_logprob=None, logprobs=None, finish_reason="abort")
        for place in range(choices)
    ]
    output = RequestOutput(call.generation_id(first), None, [], None, made, finished=True)
    call.note(output, is_delta=False, first=first)
    yield output
