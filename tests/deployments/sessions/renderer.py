"""The renderer of a session over the models' own tokenizers and templates, as `TransformersChatTokenizer` uses them."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import AutoTokenizer

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.protocols.chat import ChatOptions
from deployments.sessions.message_comparison import text_of
from deployments.sessions.records import ChatContext, ChatMessage, SessionRenderer
from tests.deployments.chat.real_tokenizers import folder_of
from tests.paths import SMALL_MODEL, TINY_MODEL

ROOM = 2**20
PLAIN = ChatContext()


class TokenizerRenderer(SessionRenderer):
    """Knows the model's tokens besides, for a fake engine."""

    def __init__(self, model: str) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.hf = tokenizer
        self._tokens = TransformersChatTokenizer(tokenizer)
        self.end_of_turn = min(self._tokens.ends_of_turn)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.hf(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokens.decode(token_ids)

    def prompt(self, messages: Sequence[ChatMessage], context: ChatContext) -> list[Sequence[int]]:
        return [*self._tokens.prompt_ids([plain(message) for message in messages], options_of(context), ROOM)]

    def following(
        self,
        messages: Sequence[ChatMessage],
        after: Sequence[int],
        context: ChatContext,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> list[Sequence[int]]:
        given: Any = [plain(message) for message in messages]
        observed = self._tokens.observations(given, after, options_of(context), ROOM, calls)
        return [message.token_ids for message in observed]

    def generation_prompt(self, context: ChatContext) -> Sequence[int]:
        return self._tokens.generation_prompt(options_of(context))

    def fresh(self, messages: Sequence[ChatMessage], context: ChatContext) -> list[int]:
        """The ids of the whole conversation, tokenized anew."""
        kwargs = {"tools": context.tools, "tokenize": False, **(context.chat_template_kwargs or {})}
        text = self.hf.apply_chat_template([plain(one) for one in messages], add_generation_prompt=True, **kwargs)
        return self.encode(text)


@lru_cache
def small() -> TokenizerRenderer:
    return TokenizerRenderer(str(SMALL_MODEL))


@lru_cache
def tiny() -> TokenizerRenderer:
    return TokenizerRenderer(str(TINY_MODEL))


@lru_cache
def real(name: str) -> TokenizerRenderer:
    """With a vendor's own tokenizer."""
    return TokenizerRenderer(str(folder_of(name)))


def options_of(context: ChatContext) -> ChatOptions:
    """As those of a session's calls."""
    tools, kwargs = context.tools, context.chat_template_kwargs
    given = [dict(tool) for tool in tools] if tools else None
    return ChatOptions("chat", given, dict(kwargs) if kwargs else None, echoes_answers=True)


def plain(message: ChatMessage) -> dict[str, Any]:
    """The message with a text for its content, without fields that are null: as servers hand it to the template."""
    return {
        **{name: value for name, value in message.items() if value is not None},
        "content": text_of(message.get("content")),
    }
