"""What a caller has seen of an answer, as the message that it will send back. No I/O, no vLLM."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

DATA = "data: "
DONE = "[DONE]"


class ShownChoices:
    """The messages of a chat's choices, joined from the events that were sent."""

    def __init__(self) -> None:
        self._content: dict[int, dict[str, str]] = {}
        self._calls: dict[int, dict[int, dict[str, str]]] = {}

    def note(self, event: str) -> None:
        """Adds what one server-sent event holds."""
        data = event.strip().removeprefix(DATA)
        if not data or data == DONE:
            return
        for choice in orjson.loads(data).get("choices") or ():
            delta, index = choice.get("delta") or {}, choice["index"]
            texts = self._content.setdefault(index, {"content": "", "reasoning": ""})
            for name in texts:
                texts[name] += delta.get(name) or ""
            for part in delta.get("tool_calls") or ():
                call = self._calls.setdefault(index, {}).setdefault(part["index"], {"name": "", "arguments": ""})
                call["id"] = part.get("id") or call.get("id", "")
                function = part.get("function") or {}
                call["name"] = function.get("name") or call["name"]
                call["arguments"] += function.get("arguments") or ""

    @property
    def messages(self) -> dict[int, Mapping[str, Any]]:
        """By index of the choice."""
        return {
            index: shown_message(
                {**texts, "tool_calls": [called(call) for call in self._calls.get(index, {}).values()]}
            )
            for index, texts in self._content.items()
        }


def called(call: Mapping[str, str]) -> dict[str, Any]:
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["name"], "arguments": call["arguments"]},
    }


def shown_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant message of an answer, with the fields by which it is known again."""
    calls = [
        {"id": call.get("id"), "type": "function", "function": dict(call["function"])}
        for call in message.get("tool_calls") or ()
    ]
    shown: dict[str, Any] = {"role": "assistant", "content": message.get("content") or None}
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        shown["reasoning"] = reasoning
    if calls:
        shown["tool_calls"] = calls
    return shown


def shown_output(items: Sequence[Any]) -> dict[str, Any]:
    """The items of OpenAI's responses API as the one message that they are when they come back."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for item in items:
        match item.type:
            case "message":
                message["content"] += "".join(getattr(part, "text", "") for part in item.content)
            case "reasoning":
                message["reasoning"] += "".join(part.text for part in item.content or ())
            case "function_call":
                function = {"name": item.name, "arguments": item.arguments}
                message["tool_calls"].append({"id": item.call_id, "function": function})
    return shown_message(message)
