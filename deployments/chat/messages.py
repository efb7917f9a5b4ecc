"""Messages of the contract as chat templates and environments see them, and back."""

from collections.abc import Sequence
from typing import Any

from rollout_client.contract import Message, PromptMessage, TextPart
from rollout_env import ChatMessage

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


def prompt_message(message: PromptMessage, token_ids: Sequence[int]) -> Message:
    """The message with its part of the prompt's tokens."""
    fields: dict[str, Any] = {**chat_message(message), "token_ids": token_ids}
    return Message.model_construct(**fields)
