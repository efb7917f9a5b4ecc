"""The model's chat template: messages to text, and which part of the text is whose."""

import inspect
from typing import Any

from transformers import PreTrainedTokenizerFast

from deployments.chat.message_cuts import RENDERING_ERRORS, Chat, marked_template, message_cuts
from deployments.protocols.chat import ChatOptions

RENDERING_ARGUMENTS = {"messages", *inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters}
"""The parameters of `apply_chat_template`; all other keyword arguments reach the template."""


class ChatTemplate:
    """Renders with the tokenizer's own template. Raises `RENDERING_ERRORS` for messages that the template refuses."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    def render(self, chat: Chat, options: ChatOptions, add_generation_prompt: bool = True) -> str:
        conversation: Any = chat
        return str(
            self._tokenizer.apply_chat_template(
                conversation,
                tools=options.tools,  # type: ignore[arg-type]
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **(options.chat_template_kwargs or {}),
            )
        )

    def with_contents(self, chat: Chat, options: ChatOptions) -> Chat:
        """The messages with an empty text for content that is missing, where the template needs a text.

        Templates disagree about a message of calls alone. Some write its calls only if its content is null; others
        write `None`, or raise an error.
        """
        if all(message.get("content") is not None for message in chat):
            return chat
        null = [{**message, "content": message.get("content")} for message in chat]
        empty = [{**message, "content": "" if message["content"] is None else message["content"]} for message in null]
        try:
            text = self.render(null, options)
        except RENDERING_ERRORS:
            return empty
        try:
            return empty if text.count("None") > self.render(empty, options).count("None") else null
        except RENDERING_ERRORS:
            return null

    def cuts(self, chat: Chat, text: str, options: ChatOptions, first: int = 0) -> list[int]:
        """The indexes in `text`, the rendering of `chat` with a generation prompt, at which its messages end, from
        number `first` on, the last one left out."""

        def marked(copies: Chat, enter: Any, leave: Any) -> str:
            tokenizer: Any = self._tokenizer
            source = tokenizer.get_chat_template(None, options.tools)
            given = {"tools": options.tools, "documents": None, **tokenizer.special_tokens_map}
            return marked_template(source).render(
                messages=copies,
                add_generation_prompt=True,
                **given | (options.chat_template_kwargs or {}),
                enter_iteration=enter,
                leave_loop=leave,
            )

        return message_cuts(chat, text, first, lambda prefix: self.render(prefix, options, False), marked)
