"""The messages that an episode adds: responses with what was read out of them, and observations with their tokens."""

from typing import Any

from deployments.protocols.chat import ParsedResponse, TokenizedObservation
from deployments.protocols.generation import packed_ids
from rollout_client.contract import Message
from rollout_env import ChatMessage


def with_parsed(response: Message, parsed: ParsedResponse) -> Message:
    """The response with what was read out of it. Text and tokens stay as they are."""
    found = {
        "tool_calls": parsed.tool_calls or None,
        "reasoning_content": parsed.reasoning_content,
        "parsed_content": parsed.parsed_content,
        "parse_error": parsed.parse_error,
    }
    return response.model_copy(update={name: value for name, value in found.items() if value is not None})


def was_parsed(response: Message) -> bool:
    """Whether something was read out of the response, or could not be."""
    return not (response.tool_calls is None and response.reasoning_content is None and response.parse_error is None)


def observation_message(message: ChatMessage, tokens: TokenizedObservation) -> Message:
    """The message with the tokens that it got, and the text that they cover."""
    fields: dict[str, Any] = {**message, "content": tokens.content, "token_ids": packed_ids(tokens.token_ids)}
    return Message.model_construct(**fields)
