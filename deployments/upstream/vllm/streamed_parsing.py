"""Streams of vLLM's servers: reasoning without its start token, tokens beside stop strings, responses that were cut.

Needed with vLLM 0.32; no upstream issue is known. `test_streamed_parsing.py` has a test of each that fails when vLLM
does it by itself.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import wraps
from typing import Any

from openai.types.responses import ResponseIncompleteEvent
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.parser.abstract_parser import DelegatingParser
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.sampling_params import SamplingParams

from deployments.upstream.vllm.token_texts import detokenizer_of

Extract = Callable[..., Any]
HELD = "_held_tokens"


def install() -> None:
    """For this process. May be called more than once."""
    parser, reasoning = DelegatingParser, BaseThinkingReasoningParser
    if not hasattr(parser.parse_delta, "__wrapped__"):
        parser.parse_delta = _with_texts_of_its_tokens(parser.parse_delta)  # type: ignore[method-assign]
    if not hasattr(reasoning.extract_reasoning_streaming, "__wrapped__"):
        extract = _without_start(reasoning.extract_reasoning_streaming)
        reasoning.extract_reasoning_streaming = extract  # type: ignore[method-assign]


def _without_start(extract: Extract) -> Extract:
    """Leaves the token that begins a thought out of streamed reasoning, also beside further tokens; once a thought.

    vLLM's parsers drop that token where an event has nothing else, also where a thought spells it. A busy server joins
    the tokens of several steps in one event, and its text then went into the reasoning, `<think>` included.
    """

    @wraps(extract)
    def extracted(
        self: BaseThinkingReasoningParser,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> Any:
        given = previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids
        if self.start_token_id in previous_token_ids and list(delta_token_ids) == [self.start_token_id]:
            return DeltaMessage(reasoning=delta_text)
        message = extract(self, *given)
        begins = self.start_token_id in delta_token_ids and self.start_token_id not in previous_token_ids
        if message is not None and message.reasoning and begins and self.end_token_id not in delta_token_ids:
            before, start, after = message.reasoning.partition(self.start_token)
            message.reasoning = after if start else before
        return message

    return extracted


def _with_texts_of_its_tokens(parse_delta: Extract) -> Extract:
    """Gives the parsers of a stream tokens and text that belong together, also where the call has stop strings.

    The engine holds back as many characters as a stop string has, and gives the tokens at once. Parsers find the end of
    a thought among the tokens and cut the text there: `</think>` was dropped or torn, and `nk>` was shown as content.
    """

    @wraps(parse_delta)
    def parsed(
        self: DelegatingParser,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> Any:
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or ()
        if max(map(len, stops), default=0) > 1 and not request.include_stop_str_in_output:
            held: _HeldTokens | None = getattr(self, HELD, None)
            if held is None:
                held = _HeldTokens(self.model_tokenizer, prompt_token_ids or [], request)
                setattr(self, HELD, held)
            delta_text, delta_token_ids = held.released(delta_text, delta_token_ids)
            if not finished and not delta_token_ids:
                return None
            if finished and (rest := held.rest()):
                first = parse_delta(self, delta_text, delta_token_ids, request, prompt_token_ids, finished=False)
                return joined(first, parse_delta(self, rest, [], request, prompt_token_ids, finished=True))
        return parse_delta(self, delta_text, delta_token_ids, request, prompt_token_ids, finished=finished)

    return parsed


def joined(first: DeltaMessage | None, second: DeltaMessage | None) -> DeltaMessage | None:
    """Two events of a stream as one."""
    if first is None or second is None:
        return first or second
    for name in ("content", "reasoning", "tool_calls"):
        before, after = getattr(first, name), getattr(second, name)
        setattr(first, name, before + after if before and after else before or after)
    return first


class _HeldTokens:
    """The tokens of a stream whose text is still held back, as vLLM's own detokenizer reads them."""

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], request: Any) -> None:
        params = SamplingParams(
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=getattr(request, "spaces_between_special_tokens", True),
        )
        self._detokenizer = detokenizer_of(tokenizer, prompt_token_ids, params)
        self._held: list[tuple[int, int]] = []
        """Each with the number of characters up to its end."""
        self._text = ""
        """Text that has come and is not released."""
        self._released = 0
        """Characters."""

    def released(self, text: str, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """The tokens whose text has come whole, with that text."""
        self._text += text
        for token_id in token_ids:
            self._detokenizer.update([token_id], stop_terminated=False)
            self._held.append((token_id, len(self._detokenizer.get_next_output_text(finished=False, delta=False))))
        come = self._released + len(self._text)
        count = sum(end <= come for _, end in self._held)
        taken, self._held = self._held[:count], self._held[count:]
        end = max((end for _, end in taken), default=self._released)
        length = end - self._released
        shown, self._text, self._released = self._text[:length], self._text[length:], end
        return shown, [token_id for token_id, _ in taken]

    def rest(self) -> str:
        """The text that a stop string has left of the last tokens, at the end."""
        rest, self._text = self._text, ""
        return rest


class _IncompleteEvent(ResponseIncompleteEvent):
    """The last event of a response that was cut, with vLLM's response."""

    response: ResponsesResponse  # type: ignore[assignment]


async def ending_as_they_end(events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The events of a response. One that was cut ends with `response.incomplete`; vLLM says that it is completed."""
    async with aclosing(events):
        async for event in events:
            if event.type == "response.completed" and event.response.status == "incomplete":
                number, response = event.sequence_number, event.response
                yield _IncompleteEvent(type="response.incomplete", sequence_number=number, response=response)
            else:
                yield event
