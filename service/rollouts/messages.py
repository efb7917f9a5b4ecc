"""Messages as an episode keeps them, as its environment sees them, and back."""

from collections.abc import Sequence
from typing import Any

from deployments.protocols import packed_ids
from rollout_client.contract import Message, PromptMessage, TextPart
from rollout_env import ChatMessage
from service.rollouts.tokenizer_protocol import TokenizedObservation


def chat_message(message: Message | PromptMessage) -> ChatMessage:
    """The message without its numbers."""
    chat: ChatMessage = {"role": message.role, "content": text_of(message.content)}
    if message.name is not None:
        chat["name"] = message.name
    if message.tool_call_id is not None:
        chat["tool_call_id"] = message.tool_call_id
    return chat


def text_of(content: str | Sequence[TextPart] | None) -> str:
    """The content of a prompt's message, which a chat template may take as parts, as a message log has it."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def observation_message(message: ChatMessage, tokens: TokenizedObservation) -> Message:
    """The message with the tokens that it got, and the text that they cover."""
    fields: dict[str, Any] = {**message, "content": tokens.content, "token_ids": packed_ids(tokens.token_ids)}
    return Message.model_construct(**fields)


def prompt_message(message: PromptMessage, token_ids: Sequence[int]) -> Message:
    """The message with its part of the prompt's tokens."""
    fields: dict[str, Any] = {**chat_message(message), "token_ids": token_ids}
    return Message.model_construct(**fields)
