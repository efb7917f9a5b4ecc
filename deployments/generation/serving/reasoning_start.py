"""Leaves the token that begins a thought out of streamed reasoning, also where it comes together with further tokens.

vLLM's parsers drop that token where an event has nothing else. A busy server joins the tokens of several steps in one
event, and its text then went into the reasoning, `<think>` included.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

Extract = Callable[..., Any]


def leave_out_start_of_reasoning() -> None:
    """For this process, once."""
    extract = BaseThinkingReasoningParser.extract_reasoning_streaming
    if not hasattr(extract, "__wrapped__"):
        BaseThinkingReasoningParser.extract_reasoning_streaming = without_start(extract)  # type: ignore[method-assign]


def without_start(extract: Extract) -> Extract:
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
        message = extract(self, *given)
        if message is not None and message.reasoning and self.start_token_id in delta_token_ids:
            before, start, after = message.reasoning.partition(self.start_token)
            message.reasoning = after if start else before
        return message

    return extracted
