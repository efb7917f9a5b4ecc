"""How harnesses send a generated message back. No I/O."""

import json
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]


def without_reasoning(message: Message) -> Message:
    content = message["content"]
    cut = content.rpartition("</think>")[2] if isinstance(content, str) else content
    return {**message, "content": cut, "reasoning_content": None}


def with_calls(message: Message, arguments_of: Callable[[str], Any]) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments_of(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def reserialized(message: Message) -> Message:
    return with_calls(message, lambda text: json.dumps(json.loads(text), indent=1))


def parsed(message: Message) -> Message:
    return with_calls(message, json.loads)


def with_whitespace(message: Message) -> Message:
    return {**message, "content": f"\n {message['content'] or ''}  "}


def with_null_fields(message: Message) -> Message:
    return {**message, "content": message["content"] or None, "refusal": None, "name": None}


def as_text_part(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"] or ""}]}


FORMS: list[Callable[[Message], Message]] = [
    dict,
    without_reasoning,
    reserialized,
    parsed,
    with_whitespace,
    with_null_fields,
    as_text_part,
]
"""The first one sends it as it was."""
