"""Messages as an episode keeps them, as its environment sees them, and back."""

from collections.abc import Sequence
from typing import Any

from deployments.protocols import packed_ids
from deployments.response_parsing import ParsedResponse
from rollout_client.contract import Message, PromptMessage, TextPart
from rollout_env import ChatMessage
from service.rollouts.tokenizer_protocol import TokenizedObservation

OPTIONAL_FIELDS = ("name", "tool_call_id", "tool_calls", "reasoning_content", "parsed_content", "parse_error")
"""What a message has beside its role and its content."""


def chat_message(message: Message | PromptMessage) -> ChatMessage:
    """The message without its numbers."""
    chat: ChatMessage = {"role": message.role, "content": text_of(message.content)}
    fields = message.__dict__
    for name in OPTIONAL_FIELDS:
        if (value := fields.get(name)) is not None:
            chat[name] = value  # type: ignore[literal-required]  # one of ChatMessage's keys
    return chat


def text_of(content: str | Sequence[TextPart] | None) -> str:
    """The content of a prompt's message, which a chat template may take as parts, as a message log has it."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


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


def prompt_message(message: PromptMessage, token_ids: Sequence[int]) -> Message:
    """The message with its part of the prompt's tokens."""
    fields: dict[str, Any] = {**chat_message(message), "token_ids": token_ids}
    return Message.model_construct(**fields)
