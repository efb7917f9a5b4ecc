"""The renderer of sessions' prompts: the model's own chat template and tokenizer, as the ingress uses them."""

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.protocols.chat import Calls, ChatOptions
from deployments.sessions.message_comparison import text_of
from deployments.sessions.records import ChatContext, ChatMessage, SessionRenderer, images_in

_ROOM = 2**31
"""No observation is cut: vLLM refuses what is too long for the model."""


class TemplateRenderer(SessionRenderer):
    """The model's own chat template and tokenizer, as the ingress uses them."""

    def __init__(self, tokenizer: TransformersChatTokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def prompt(self, messages: Sequence[ChatMessage], context: ChatContext) -> list[Sequence[int]]:
        """Raises `PromptRejected`."""
        return [*self._tokenizer.prompt_ids(messages, _options_of(context), self._max_model_len)]

    def following(
        self, messages: Sequence[ChatMessage], after: Sequence[int], context: ChatContext, calls: Calls = ()
    ) -> list[Sequence[int]]:
        """Raises `EnvironmentRejected` for a message that the template refuses or drops."""
        given: Any = [_plain(message) for message in messages]
        observed = self._tokenizer.observations(given, after, _options_of(context), _ROOM, calls)
        return [message.token_ids for message in observed]

    def generation_prompt(self, context: ChatContext) -> Sequence[int]:
        return self._tokenizer.generation_prompt(_options_of(context))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without special tokens."""
        return self._tokenizer.decode(token_ids)


def _options_of(context: ChatContext) -> ChatOptions:
    tools, kwargs = context.tools, context.chat_template_kwargs
    given = [dict(tool) for tool in tools] if tools else None
    return ChatOptions("chat", given, dict(kwargs) if kwargs else None, echoes_answers=True)


def _plain(message: ChatMessage) -> Mapping[str, Any]:
    """The message with a text for its content, unless it shows images; without fields that are null."""
    fields = {name: value for name, value in message.items() if value is not None}
    return fields if images_in(message) else {**fields, "content": text_of(message.get("content"))}
