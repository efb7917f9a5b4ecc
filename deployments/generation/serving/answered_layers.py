"""vLLM's serving layers, with a session's settings in its requests and a record of its answers.

A session's settings are written into the requests of its calls before vLLM's layers read them. Answers are recorded,
where a session asks, before their callers see their ends. An answer that shows token ids says which weights made them;
so does a text completion that shows log-probabilities.
"""

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError

from deployments.generation.engine_outputs import GeneratedChoice
from deployments.generation.serving.served_call import CURRENT_CALL, ServedCall, answered_failures
from deployments.generation.serving.session_call import DATA, shown_message
from deployments.protocols.generation import TIED_TOKENS, derived_seed
from rollout_client.contract.rollouts import LOWEST_TEMPERATURE, Sampling


def _prepare_chat(request: Any, call: ServedCall) -> None:
    """Prepares vLLM's `ChatCompletionRequest`. Raises `VLLMValidationError`."""
    if request.use_beam_search:
        raise VLLMValidationError("A session records samples, not beams.", parameter="use_beam_search")
    given = request.model_fields_set
    length = "max_completion_tokens"
    _fill(request, call, length, has_length=bool(given & {"max_tokens", "max_completion_tokens"}))


def _prepare_responses(request: Any, call: ServedCall) -> None:
    """Prepares vLLM's `ResponsesRequest`. Raises `VLLMValidationError`."""
    if request.background or request.previous_response_id is not None:
        field = "background" if request.background else "previous_response_id"
        message = f"A session takes no `{field}`: send the items of the conversation."
        raise VLLMValidationError(message, parameter=field)
    _fill(request, call, "max_output_tokens", has_length="max_output_tokens" in request.model_fields_set)


def refuse_without_columns(request: Any, call: ServedCall, most_logprobs: int) -> None:
    """Raises `VLLMValidationError` (400) if the call's sampling leaves no place for what its session includes.

    Args:
        most_logprobs: how many of the likeliest tokens the engine names; -1 for all.
    """
    include = call.request.include
    of_sampling = [name for name in ("sampling_mask", "entropy") if getattr(include, name)]
    included = ", ".join(["top_logprobs"] * bool(include.top_logprobs) + of_sampling)
    for name in ("logprob_token_ids", "prompt_logprobs"):
        if included and getattr(request, name, None) is not None:
            message = f"A session that includes {included} takes no `{name}`: leave it out."
            raise VLLMValidationError(message, parameter=name)
    if not of_sampling:
        return
    if request.temperature < LOWEST_TEMPERATURE:
        message = f"send a temperature of at least {LOWEST_TEMPERATURE}: greedy decoding draws from no distribution"
        raise VLLMValidationError(f"The session includes {included}: {message}.", parameter="temperature")
    highest = None if most_logprobs < 0 else most_logprobs - TIED_TOKENS
    if request.top_k < 1 or (highest is not None and request.top_k > highest):
        bound = "of at least 1" if highest is None else f"from 1 to {highest}"
        message = f"send a top_k {bound}, or leave it to the session"
        raise VLLMValidationError(f"The session includes {included}: {message}.", parameter="top_k")


def _fill(request: Any, call: ServedCall, length: str, has_length: bool) -> None:
    """Fills in the fields of sampling that the caller left out, and lets any name stand for the model.

    vLLM's own defaults are those of the model's generation config; rollouts have none of these.
    """
    request.model = None
    given = request.model_fields_set
    if request.seed is not None:
        request.seed = seed_in_group(request.seed, call)
    defaults = sampling_of_session(call)
    most_tokens = defaults.pop("max_tokens", None)
    for name, value in defaults.items():
        if name in type(request).model_fields and (name not in given or getattr(request, name) is None):
            setattr(request, name, value)
    if not has_length and most_tokens is not None:
        setattr(request, length, most_tokens)


def sampling_of_session(call: ServedCall) -> dict[str, Any]:
    """How tokens are sampled where a call of a session does not say, by the names of vLLM's parameters."""
    sampling = call.request.session_sampling or Sampling()
    of_length = {} if sampling.max_new_tokens is None else {"max_tokens": sampling.max_new_tokens}
    return of_length | {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop": list(sampling.stop_strings),
        "ignore_eos": sampling.ignore_eos,
    }


def seed_in_group(seed: int, call: ServedCall) -> int:
    """The seed that a call of a session gives, for this session of its group."""
    # The same program plays each session of a group: with equal seeds they would be equal.
    return derived_seed(seed, call.request.generation_index) if call.request.generation_index else seed


_VERSIONS = "weight_versions"


class AnsweredChat(OpenAIServingChat):
    async def create_chat_completion(self, request: ChatCompletionRequest, raw_request: Request | None = None) -> Any:
        call = CURRENT_CALL.get()
        if call.session is not None:
            call.session.answer_id = f"chatcmpl-{call.request.generation_id}"
            _prepare_chat(request, call)
            refuse_without_columns(request, call, self.model_config.max_logprobs)
        answer = await super().create_chat_completion(request, raw_request)
        return await _noted(answer, call, bool(request.return_token_ids))


class AnsweredMessages(AnsweredChat, AnthropicServingMessages):
    """Converts to and from `AnsweredChat`."""


class AnsweredCompletions(OpenAIServingCompletion):
    """No session records text completions."""

    async def create_completion(self, request: CompletionRequest, raw_request: Request | None = None) -> Any:
        if request.use_beam_search:
            # To which prompt each of its generations belongs is not known: what they take could not be counted.
            raise VLLMValidationError("Text completions take no beam search here.", parameter="use_beam_search")
        call = CURRENT_CALL.get()
        shows_versions = bool(request.return_token_ids) or request.logprobs is not None
        return await _noted(await super().create_completion(request, raw_request), call, shows_versions)


class AnsweredResponses(OpenAIServingResponses):
    async def create_responses(
        self, request: ResponsesRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[Any, None] | ResponsesResponse | ErrorResponse:
        call = CURRENT_CALL.get()
        request.request_id = f"resp_{call.request.generation_id}"
        if call.session is not None:
            call.session.answer_id = request.request_id
            _prepare_responses(request, call)
            refuse_without_columns(request, call, self.model_config.max_logprobs)
        answer = await super().create_responses(request, raw_request)
        if isinstance(answer, ErrorResponse):
            return answer
        if not isinstance(answer, ResponsesResponse):
            return _sent_responses(answer, call)
        await call.record({0: _shown_output(answer.output)})
        return answer


_NOT_IN_TOKENS = ("content_parts", "features", "kv_transfer_params", "ec_transfer_params", "priority")
"""Fields of vLLM's API of token ids that would go past the image store, the scheduler or the replica."""


class AnsweredTokens(ServingTokens):
    """Token ids in, token ids out. vLLM's own answers say which weights made which tokens."""

    async def serve_tokens(self, request: GenerateRequest, raw_request: Request | None = None) -> Any:
        call, session = CURRENT_CALL.get(), CURRENT_CALL.get().session
        if (asked := next((name for name in _NOT_IN_TOKENS if getattr(request, name)), None)) is not None:
            raise VLLMValidationError(f"`{asked}` is not served here: leave it out.", parameter=asked)
        if session is not None:
            request.model = None
            session.answer_id = f"generate-tokens-{call.request.generation_id}"
            _fill_params(request, call)
            refuse_without_columns(request.sampling_params, call, self.model_config.max_logprobs)
            with answered_failures():
                await session.prepare_tokens(request.token_ids)
        answer = await _noted(await super().serve_tokens(request, raw_request), call, shows_versions=False)
        if isinstance(answer, ErrorResponse):
            return answer
        if isinstance(answer, BaseModel):
            return _with_tokens(bytes(JSONResponse(answer.model_dump()).body))
        return _events_with_tokens(answer)


_TOKEN_ID = re.compile(rb'"token_id":(\d+)')


def _with_tokens(body: bytes) -> bytes:
    """`"token": "token_id:5"` beside each `"token_id": 5`: vLLM said it so before 0.32, and trainers read it."""
    return _TOKEN_ID.sub(rb'"token":"token_id:\1","token_id":\1', body)


async def _events_with_tokens(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        async for event in events:
            yield _with_tokens(event.encode()).decode()


def _fill_params(request: GenerateRequest, call: ServedCall) -> None:
    """Fills in the parameters that the caller left out, as `_fill` does."""
    params = request.sampling_params
    if params.seed is not None:
        params.seed = seed_in_group(params.seed, call)
    for name, value in sampling_of_session(call).items():
        if not request.is_sampling_param_provided(name):
            setattr(params, name, value)
            if request._sampling_params_provided_keys is not None:
                request._sampling_params_provided_keys.add(name)
    params.__post_init__()


async def _noted(answer: Any, call: ServedCall, shows_versions: bool) -> Any:
    """The answer once its call is recorded, with the versions of its choices where they are shown; or its events."""
    if isinstance(answer, ErrorResponse):
        return answer
    if not isinstance(answer, BaseModel):
        return _answered_events(answer, call, shows_versions)
    choices = getattr(answer, "choices", ())
    # Choices of token ids show no message.
    messages = {choice.index: choice.message for choice in choices if hasattr(choice, "message")}
    await call.record({index: shown_message(message.model_dump()) for index, message in messages.items()})
    for choice in choices if shows_versions else ():
        # vLLM's types of answers take further fields.
        setattr(choice, _VERSIONS, _versions_of(call, choice.index))
    return answer


async def _answered_events(
    events: AsyncGenerator[str, None], call: ServedCall, shows_versions: bool
) -> AsyncGenerator[str, None]:
    """The events of a chat, a text completion or token ids. In a session those from the first `finish_reason` on wait
    until the call is recorded.
    """
    held = list[str]()
    async with aclosing(events):
        async for event in events:
            if call.session is not None:
                call.session.shown.note(event)
            ends = '"finish_reason":"' in event
            sent = _with_versions(event, call) if ends and shows_versions else event
            if call.session is None or not (ends or held):
                yield sent
            else:
                held.append(sent)
    if call.session is not None:
        await call.record(call.session.shown.messages)
    for event in held:
        yield event


async def _sent_responses(events: AsyncGenerator[Any, None], call: ServedCall) -> AsyncGenerator[str, None]:
    """The events of a response as they are sent; in a session the last one waits until the call is recorded."""
    async with aclosing(events):
        async for event in events:
            response = getattr(event, "response", None)
            if event.type in ("response.completed", "response.incomplete") and response is not None:
                await call.record({0: _shown_output(response.output)})
            yield f"event: {event.type}\ndata: {event.model_dump_json(indent=None, by_alias=True)}\n\n"


def _with_versions(event: str, call: ServedCall) -> str:
    """The event with `weight_versions` of each choice that it ends."""
    chunk = orjson.loads(event.removeprefix(DATA))
    for choice in chunk.get("choices", ()):
        if choice.get("finish_reason") is not None:
            choice[_VERSIONS] = _versions_of(call, choice["index"])
    return f"{DATA}{orjson.dumps(chunk).decode()}\n\n"


def _versions_of(call: ServedCall, index: int) -> list[dict[str, Any]]:
    return shown_versions(call.choices[index]) if index in call.choices else []


def shown_versions(choice: GeneratedChoice) -> list[dict[str, Any]]:
    return [{"version": span.version, "start": span.start, "end": span.end} for span in choice.weight_versions]


def _shown_output(items: Sequence[Any]) -> dict[str, Any]:
    """The items of OpenAI's responses API as the one message that they are when they come back."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for item in items:
        match item.type:
            case "message":
                message["content"] += "".join(getattr(part, "text", "") for part in item.content)
            case "reasoning":
                message["reasoning"] += "".join(part.text for part in item.content or ())
            case "function_call":
                function = {"name": item.name, "arguments": item.arguments}
                message["tool_calls"].append({"id": item.call_id, "function": function})
    return shown_message(message)
