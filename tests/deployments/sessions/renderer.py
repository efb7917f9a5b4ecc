"""The renderer of a session's calls over the models' own tokenizers and templates."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import AutoTokenizer

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.generation.serving.template_renderer import TemplateRenderer
from deployments.sessions.message_comparison import text_of
from deployments.sessions.records import ChatContext, ChatMessage
from tests.deployments.chat.real_tokenizers import folder_of
from tests.paths import SMALL_MODEL, TINY_MODEL

ROOM = 2**20
PLAIN = ChatContext()


class TokenizerRenderer(TemplateRenderer):
    """Knows the model's tokens besides, for a fake engine."""

    def __init__(self, model: str) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.hf = tokenizer
        tokens = TransformersChatTokenizer(tokenizer)
        super().__init__(tokens, ROOM)
        self.end_of_turn = min(tokens.ends_of_turn)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.hf(text, add_special_tokens=False)["input_ids"]
        return ids

    def prompt(self, messages: Sequence[ChatMessage], context: ChatContext) -> list[Sequence[int]]:
        return super().prompt([plain(message) for message in messages], context)

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


def plain(message: ChatMessage) -> dict[str, Any]:
    """The message with a text for its content, without fields that are null: as servers hand it to the template."""
    return {
        **{name: value for name, value in message.items() if value is not None},
        "content": text_of(message.get("content")),
    }
