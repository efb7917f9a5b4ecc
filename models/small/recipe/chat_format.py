"""The model's tokens and its chat format: ChatML with tools, tool results and reasoning in the tags of Hermes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from models.recipes import NO_LOSS, Conversation, byte_tokenizer

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = [
    "<think>",
    "</think>",
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
"""Part of the text: an environment reads them in a reply, and the parsers of tool calls look for them."""
START, END = 257, 258
THINK, THINK_END = 259, 260
VOCABULARY_SIZE = 256 + len(SPECIAL_TOKENS) + len(MARKERS)
MAX_POSITIONS = 16384
CHAT_TEMPLATE = Path(__file__).parent.parent / "chat_template.jinja"
ASSISTANT_TURN = [START, *b"assistant\n"]
EMPTY_THOUGHT = [THINK, THINK_END]

ChatMessages = Sequence[Mapping[str, Any]]


def make_tokenizer() -> PreTrainedTokenizerFast:
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return byte_tokenizer(SPECIAL_TOKENS, MARKERS, end="<|im_end|>", positions=MAX_POSITIONS, chat_template=template)


def rendered_ids(
    tokenizer: PreTrainedTokenizerFast,
    messages: ChatMessages,
    tools: Sequence[Mapping[str, Any]],
    thinks: bool,
    for_reply: bool = False,
) -> list[int]:
    """The chat template's rendering as token ids.

    Args:
        thinks: false renders with `enable_thinking=False`: each reply begins with an empty thought.
        for_reply: end with the beginning of the next reply.
    """
    untyped: Any = tokenizer
    options = {} if thinks else {"enable_thinking": False}
    text = untyped.apply_chat_template(
        messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=for_reply, **options
    )
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def conversation_of(
    tokenizer: PreTrainedTokenizerFast, messages: ChatMessages, tools: Sequence[Mapping[str, Any]], thinks: bool
) -> Conversation:
    """The whole conversation; learnt are the assistant's own tokens and the `<|im_end|>` that closes each reply.

    An empty thought is the template's with `enable_thinking=False`, else the assistant's own.
    """
    token_ids = rendered_ids(tokenizer, messages, tools, thinks)
    labels = [NO_LOSS] * len(token_ids)
    place = 0
    while place < len(token_ids):
        if token_ids[place : place + len(ASSISTANT_TURN)] != ASSISTANT_TURN:
            place += 1
            continue
        place += len(ASSISTANT_TURN)
        if not thinks:
            place += len(EMPTY_THOUGHT)
        end = token_ids.index(END, place) + 1
        labels[place:end] = token_ids[place:end]
        place = end
    return Conversation(token_ids, labels)
