"""Compares the messages that a harness sends with those that its session has, and reports where they differ. No I/O.

A message that was rendered is the same only if the template renders it alike: all its fields count. A generated message
is known by its text and its calls, because harnesses change the rest: they leave reasoning out, parse the calls and
write their JSON anew, trim whitespace, or send null for an empty content. The drift report says where a message came
back in another form, and what was done about it.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, get_args

from deployments.failures import PromptRejected
from deployments.sessions.records import ChatContext, ChatMessage, GeneratedMessage
from rollout_client.contract.sessions import CallDrift, DriftAction, DriftReport, MessageDrift

_REASONING_ENDS = "</think>"
"""A harness may cut the text of a response after this by itself, where no parser does."""
_DIGEST_BYTES = 16
_NO_ARGUMENTS = "{}"
_REASONING_FIELDS = ("reasoning_content", "reasoning")
"""By what names servers and harnesses call it."""


def rendered_key(message: ChatMessage) -> bytes:
    """Equal for messages that a chat template renders alike."""
    fields = {name: value for name, value in message.items() if value is not None and value != []}
    fields["content"] = _plain_content(message.get("content"))
    if "tool_calls" in fields:
        fields["tool_calls"] = [[name, *call] for name, call in zip(call_ids(message), _calls_of(message), strict=True)]
    return _digest_of(fields)


def context_key(context: ChatContext) -> bytes:
    return _digest_of([context.tools or None, context.chat_template_kwargs or None])


def response_key(message: ChatMessage) -> bytes:
    """The key of an assistant message as a harness sends it."""
    return _key_of_text(text_of(message.get("content")), _calls_of(message))


def response_keys(generated: GeneratedMessage) -> frozenset[bytes]:
    """Every `response_key` under which a generated message may come back."""
    text, shown = generated.text, text_of(generated.message.get("content"))
    calls = _calls_of(generated.message)
    keys = [_key_of_text(parsed, calls) for parsed in (shown, shown.rpartition(_REASONING_ENDS)[2])]
    keys += [_key_of_text(raw, []) for raw in (text, text.rpartition(_REASONING_ENDS)[2])]
    return frozenset(keys)


def has_other_reasoning(message: ChatMessage, generated: GeneratedMessage) -> bool:
    """Whether a harness sends reasoning that was not generated. One that leaves it out does not."""
    said = _collapsed(reasoning_of(message))
    if not said:
        return False
    shown = _collapsed(reasoning_of(generated.message))
    return said != shown if shown else said not in _collapsed(generated.text)


def changed_fields(message: ChatMessage, generated: GeneratedMessage) -> list[str]:
    """The fields of a generated message that come back with another meaning, in their order."""
    shown = generated.message
    pairs = {
        "content": (text_of(shown.get("content")), text_of(message.get("content"))),
        "reasoning_content": (reasoning_of(shown), reasoning_of(message)),
        "tool_calls": (_calls_of(shown), _calls_of(message)),
    }
    return [name for name, (before, after) in pairs.items() if before != after]


def call_ids(message: ChatMessage) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def text_of(content: object) -> str:
    """The content of a message, which may be null or parts, as one text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def reasoning_of(message: ChatMessage) -> str:
    return next((str(message[name]) for name in _REASONING_FIELDS if message.get(name)), "")


def plain_message(message: ChatMessage) -> ChatMessage:
    """The message as every SDK's dump of it is recorded and rendered: with a text for its content where it has one.

    Beside tool calls they send null, an empty text, an empty list or nothing, and vLLM hands the template different
    things for them: some templates refuse one, others print another.
    """
    return {**message, "content": _plain_content(message.get("content"))}


def _plain_content(content: object) -> object:
    """The content as text where it is one text: templates render a single part like its text."""
    match content:
        case None | []:
            return ""
        case [{"type": "text", "text": str(text)}]:
            return text
    return content


def _calls_of(message: ChatMessage) -> list[tuple[str, str]]:
    """Names and arguments."""
    functions = (call.get("function") or call for call in message.get("tool_calls") or ())
    return [(str(function.get("name")), _canonical(function.get("arguments"))) for function in functions]


def _canonical(arguments: object) -> str:
    """Anything but a JSON object counts as the empty one, which vLLM then hands to the chat template."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(parsed, sort_keys=True) if isinstance(parsed, Mapping) else _NO_ARGUMENTS
    except (ValueError, RecursionError):
        return _NO_ARGUMENTS


def _collapsed(text: str) -> str:
    return " ".join(text.split())


def _key_of_text(content: str, calls: Sequence[tuple[str, str]]) -> bytes:
    return _digest_of([_collapsed(content), calls])


def _digest_of(value: object) -> bytes:
    """Raises `PromptRejected` for what is nested more deeply than JSON is written."""
    try:
        return blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=_DIGEST_BYTES).digest()
    except RecursionError as error:
        raise PromptRejected("The messages or tools are nested too deeply.") from error


def message_drift(place: int, message: ChatMessage, action: DriftAction, fields: Sequence[str] = ()) -> MessageDrift:
    return MessageDrift(message=place, role=str(message.get("role")), action=action, fields=[*fields])


def new_messages_drift(messages: Sequence[ChatMessage], first: int, is_branch: bool) -> Iterator[MessageDrift]:
    """The drift of the messages from place `first` on, which the session does not have.

    Args:
        is_branch: whether the session has another message at this place.
    """
    if is_branch:
        yield message_drift(first, messages[first], "new_branch")
    for place in range(first + is_branch, len(messages)):
        if messages[place].get("role") == "assistant":
            yield message_drift(place, messages[place], "rendered_anew")


def drift_report(session_id: str, calls: Collection[CallDrift]) -> DriftReport:
    actions = [message.action for call in calls for message in call.messages]
    counts: dict[DriftAction, int] = {action: actions.count(action) for action in get_args(DriftAction)}
    drifted = [call for call in calls if call.messages]
    return DriftReport(session_id=session_id, calls=len(calls), drift=drifted, counts=counts)
