"""The model's tokens and its chat format: ChatML with tools, tool results and reasoning in the tags of Hermes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from models.byte_tokenizer import byte_tokenizer

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
PAD, START, END = range(256, 259)
THINK, THINK_END = 259, 260
VOCABULARY_SIZE = 256 + len(SPECIAL_TOKENS) + len(MARKERS)
MAX_POSITIONS = 16384
CHAT_TEMPLATE = Path(__file__).parent.parent / "chat_template.jinja"
NO_LOSS = -100
ASSISTANT_TURN = [START, *b"assistant\n"]
EMPTY_THOUGHT = [THINK, THINK_END]

ChatMessages = Sequence[Mapping[str, Any]]


class Conversation(NamedTuple):
    """Token ids and, aligned with them, the ids to learn: `NO_LOSS` where nothing is learnt."""

    token_ids: list[int]
    labels: list[int]


def make_tokenizer() -> PreTrainedTokenizerFast:
    untyped: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = untyped(
        tokenizer_object=byte_tokenizer(SPECIAL_TOKENS, MARKERS),
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )
    return tokenizer


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
