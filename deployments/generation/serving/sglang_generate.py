"""SGLang's `/generate` over the engine, as trainers that were written for SGLang call it.

Prompts and sampled tokens are ids; the answer has SGLang's fields (`meta_info`), with the log-probabilities of the
distribution that was sampled from, and says which weights made which tokens. Events of a stream are cumulative, as
SGLang's are by default; the log-probabilities of a prompt are in the one that ends it.
"""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.utils.async_utils import merge_async_iterators

from deployments.generation.engine_outputs import GeneratedChoice
from deployments.generation.serving.answered_layers import refuse_without_columns, shown_versions
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
_TokenLogprob = tuple[float | None, int, None]
"""The log-probability of a token, its id, and no text of it: an entry of SGLang's lists."""


@dataclass(eq=False)
class _PromptAnswer:
    """The answer to one prompt, as far as the engine's outputs have come."""

    request: SGLangRequest
    rid: str
    prompt_token_ids: Sequence[int]
    call: ServedCall
    version: str
    """The weights with which it begins."""
    made: GeneratedChoice = field(default_factory=GeneratedChoice)
    texts: list[str] = field(default_factory=list)
    stop_reason: int | str | None = None
    prompt_logprobs: Sequence[Any] = ()
    """vLLM's, a mapping for each token but the first."""
    cached_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        """Takes an output of the engine, with the tokens since the one before."""
        [completion] = output.outputs
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.cached_tokens = output.num_cached_tokens or self.cached_tokens
        self.made.add(completion, keeps_logprobs=self.request.return_logprob, columns=None)
        self.texts.append(completion.text)
        self.stop_reason = completion.stop_reason

    def shown(self) -> dict[str, Any]:
        """As SGLang's server answers it. Until it has ended it is without what its prompt has in numbers."""
        generates, made = self.request.generates, self.made
        token_ids = list(made.token_ids) if generates else []
        spans = shown_versions(made) if generates else []
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self._finish_reason(),
            "prompt_tokens": len(self.prompt_token_ids),
            "weight_version": spans[-1]["version"] if spans else self.version,
            "weight_versions": spans,
            "completion_tokens": len(token_ids),
            "cached_tokens": self.cached_tokens,
        }
        if self.call.session is not None:
            meta["generation_id"] = self.call.session.answer_id
        if self.request.return_logprob:
            shown = zip(made.logprobs[: len(token_ids)], token_ids, strict=True)
            meta["output_token_logprobs"] = [_entry(logprob, token_id) for logprob, token_id in shown]
            meta["output_token_logprobs_length"] = len(token_ids)
            if made.finish_reason is not None:
                meta["input_token_logprobs"] = self._prompt_numbers()
        return {"text": "".join(self.texts) if generates else "", "output_ids": token_ids, "meta_info": meta}

    def _finish_reason(self) -> dict[str, Any] | None:
        match self.made.finish_reason:
            case None:
                return None
            case "abort":
                return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            case _ if not self.request.generates:
                return {"type": "length", "length": 0}
            case "stop":
                matched = self.made.token_ids[-1] if self.stop_reason is None else self.stop_reason
                return {"type": "stop", "matched": matched}
            case reason:
                return {"type": reason, "length": len(self.made.token_ids)}

    def _prompt_numbers(self) -> list[_TokenLogprob]:
        """The log-probabilities of the prompt. The first one is null, wherever they begin."""
        start = self.request.logprob_start_len
        if start == NO_INPUT_LOGPROBS:
            return []
        ids, positions = self.prompt_token_ids[start:], self.prompt_logprobs[start + 1 :]
        following = zip(positions, ids[1:], strict=False)
        first: list[_TokenLogprob] = [(None, token_id, None) for token_id in ids[:1]]
        return first + [_entry(position[token_id].logprob, token_id) for position, token_id in following]


def _entry(logprob: float, token_id: int) -> _TokenLogprob:
    return max(logprob, _LEAST_LOGPROB), token_id, None


class AnsweredGenerate(GenerateBaseServing):
    """Answers calls of `/generate`, with the prompts of each in their order."""

    def __init__(
        self, engine: Any, models: Any, renderer: Any, aborts: CallAborts, current_version: Callable[[str | None], str]
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
        inputs = await self._renderer.preprocess_completion(
            request, prompt_input=request.prompts, prompt_embeds=None, skip_mm_cache=True
        )
        if call.session is not None:
            await _prepare_session(call, request, [one["prompt_token_ids"] for one in inputs])
        answers, outputs = self._start(request, inputs, call)
        if request.stream:
            return self._events(answers[0], outputs, call)
        async with aclosing(outputs):
            async for place, output in outputs:
                self._refuse_failed(output)
                answers[place].add(output)
        await call.record({})
        shown = [answer.shown() for answer in answers]
        return orjson.dumps(shown[0] if request.is_single else shown)

    def _start(
        self, request: SGLangRequest, inputs: Sequence[Any], call: ServedCall
    ) -> tuple[list[_PromptAnswer], AsyncGenerator[tuple[int, RequestOutput], None]]:
        """The answers, without anything yet, and the outputs that make them, each with the place of its prompt."""
        answers: list[_PromptAnswer] = []
        running: list[AsyncGenerator[RequestOutput, None]] = []
        version, rid = self._current_version(call.request.policy), request.rid or call.request.generation_id
        for place, engine_input in enumerate(inputs):
            ids = engine_input["prompt_token_ids"]
            params = params_of(request, place, ids, call, self.model_config.max_model_len)
            if call.session is not None:
                refuse_without_columns(params, call, self.model_config.max_logprobs)
            name = rid if request.is_single else f"{rid}_{place}"
            answers.append(_PromptAnswer(request, name, ids, call, version))
            abortable = AbortableCall(call.request, name, call.generation_id(place))
            if self._aborts.is_aborted(abortable):
                call.begin_prompt(1)
                running.append(_aborted_at_once(call, place))
            else:
                outputs = self.engine_client.generate(engine_input, params, call.generation_id(place))
                running.append(_abortable_outputs(self._aborts, abortable, outputs))
        return answers, merge_async_iterators(*running)

    async def _events(
        self, answer: _PromptAnswer, outputs: AsyncGenerator[tuple[int, RequestOutput], None], call: ServedCall
    ) -> AsyncGenerator[str, None]:
        """The events of a stream. In a session the last one waits until the call is recorded."""
        next_at = 0.0
        try:
            async with aclosing(outputs):
                async for _, output in outputs:
                    self._refuse_failed(output)
                    answer.add(output)
                    if answer.made.finish_reason is None and (now := time.monotonic()) >= next_at:
                        next_at = now + EVENT_EVERY_S * max(len(answer.made.token_ids) / TOKENS_OF_EVENT, 1)
                        yield _event(answer)
            await call.record({})
            yield _event(answer)
        except VLLMError as error:
            yield f"{DATA}{self.create_streaming_error_response(error)}\n\n"
        yield f"{DATA}{DONE}\n\n"

    def _refuse_failed(self, output: RequestOutput) -> None:
        """Raises vLLM's `GenerationError` if the engine has failed in the middle of it."""
        for completion in output.outputs:
            self._raise_if_error(completion.finish_reason, output.request_id)


def _event(answer: _PromptAnswer) -> str:
    return f"{DATA}{orjson.dumps(answer.shown()).decode()}\n\n"


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


async def _aborted_at_once(call: ServedCall, place: int) -> AsyncGenerator[RequestOutput, None]:
    """The output of a prompt that was aborted before the engine had it."""
    made = CompletionOutput(0, "", [], cumulative_logprob=None, logprobs=None, finish_reason="abort")
    output = RequestOutput(call.generation_id(place), None, [], None, [made], finished=True)
    call.note(output, is_delta=False, first=place)
    yield output
