"""Compares the messages that a harness sends with those that its session has, and reports where they differ. No I/O.

A message that was rendered is the same only if the template renders it alike: all its fields count. A generated message
is known by its text and its calls, because harnesses change the rest: they leave reasoning out, parse the calls and
write their JSON anew, trim whitespace, or send null for an empty content. The drift report says where a message came
back in another form, and what was done about it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from deployments.failures import PromptRejected
from deployments.sessions.records import ChatContext, ChatMessage, GeneratedMessage
from rollout_client.contract.sessions import LONGEST_DRIFT_TEXT, CallDrift, DriftAction, DriftReport, MessageDrift
from rollout_env.records import escaped_half_surrogates

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
        fields["tool_calls"] = [
            [name, *call] for name, call in zip(call_ids(message), _calls_of(message, canonical), strict=True)
        ]
    return digest_of(fields)


def context_key(context: ChatContext) -> bytes:
    return digest_of([context.tools or None, context.chat_template_kwargs or None])


def response_key(message: ChatMessage) -> bytes:
    """The key of an assistant message as a harness sends it."""
    return _key_of_text(text_of(message.get("content")), _calls_of(message, canonical))


def response_keys(generated: GeneratedMessage) -> frozenset[bytes]:
    """Every `response_key` under which a generated message may come back."""
    text = generated.text
    return frozenset(
        {
            response_key(generated.message),
            _key_of_text(text, []),
            _key_of_text(text.rpartition(_REASONING_ENDS)[2], []),
            _key_of_text(
                text_of(generated.message.get("content")).rpartition(_REASONING_ENDS)[2],
                _calls_of(generated.message, canonical),
            ),
        }
    )


def has_other_reasoning(message: ChatMessage, generated: GeneratedMessage) -> bool:
    """Whether a harness sends reasoning that was not generated. One that leaves it out does not."""
    said = _collapsed(reasoning_of(message))
    if not said:
        return False
    shown = _collapsed(reasoning_of(generated.message))
    return said != shown if shown else said not in _collapsed(generated.text)


def changed_fields(message: ChatMessage, generated: GeneratedMessage) -> list[str]:
    """The fields of a generated message that come back with another text, in their order.

    Arguments of calls that vLLM has parsed have no text any more: what they say is compared.
    """
    shown = generated.message
    is_parsed = any(isinstance(function.get("arguments"), Mapping) for function in _functions_of(message))
    read = _parsed_arguments if is_parsed else _written_arguments
    pairs = {
        "content": (text_of(shown.get("content")), text_of(message.get("content"))),
        "reasoning_content": (reasoning_of(shown), reasoning_of(message)),
        "tool_calls": (_calls_of(shown, read), _calls_of(message, read)),
    }
    return [name for name, (before, after) in pairs.items() if before != after]


def call_ids(message: ChatMessage) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def shown_text(message: ChatMessage) -> str:
    """The message as one text, for people: its reasoning, its content, its calls."""
    calls = (f"{name}({arguments})" for name, arguments in _calls_of(message, _written_arguments))
    return "\n".join(filter(None, (reasoning_of(message), text_of(message.get("content")), *calls)))


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


def _calls_of(message: ChatMessage, read: Callable[[object], str]) -> list[tuple[str, str]]:
    """Names and arguments. Args: `read` gives the arguments of a call as text."""
    return [(str(function.get("name")), read(function.get("arguments"))) for function in _functions_of(message)]


def _functions_of(message: ChatMessage) -> list[Mapping[str, Any]]:
    return [call.get("function") or call for call in message.get("tool_calls") or ()]


def _parsed_arguments(arguments: object) -> str:
    """As sorted JSON if they are a JSON object."""
    text = _written_arguments(arguments)
    return canonical(text) if _is_object(text) else text


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), Mapping)
    except (ValueError, RecursionError):
        return False


def canonical(arguments: object) -> str:
    """Anything but a JSON object counts as the empty one, which vLLM then hands to the chat template."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(parsed, sort_keys=True) if isinstance(parsed, Mapping) else _NO_ARGUMENTS
    except (ValueError, RecursionError):
        return _NO_ARGUMENTS


def _written_arguments(arguments: object) -> str:
    """As they were written."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _collapsed(text: str) -> str:
    return " ".join(text.split())


def _key_of_text(content: str, calls: Iterable[tuple[str, str]]) -> bytes:
    return digest_of([_collapsed(content), list(calls)])


def digest_of(value: object) -> bytes:
    """Raises `PromptRejected` for what is nested more deeply than JSON is written."""
    try:
        return blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=_DIGEST_BYTES).digest()
    except RecursionError as error:
        raise PromptRejected("The messages or tools are nested too deeply.") from error


_SHOWN_BEFORE = 20
"""Characters before the first difference that a report shows."""


def generated_ids_drift(
    place: int, message: ChatMessage, generated: GeneratedMessage, fields: list[str]
) -> MessageDrift:
    """A generated message in another form, in whose place the engine's own ids are used."""
    return _drift_of(place, message, "generated_ids", fields, generated.message)


def new_messages_drift(
    messages: Sequence[ChatMessage], first: int, recorded: ChatMessage | None
) -> Iterator[MessageDrift]:
    """The drift of the messages from place `first` on, which the session does not have.

    Args:
        recorded: what it has at this place; `None`: nothing, so that no branch starts.
    """
    if recorded is not None:
        yield _drift_of(first, messages[first], "new_branch", [], recorded)
    for place in range(first + (recorded is not None), len(messages)):
        if messages[place].get("role") == "assistant":
            yield _drift_of(place, messages[place], "rendered_anew", [], None)


def drift_report(session_id: str, calls: Sequence[CallDrift]) -> DriftReport:
    counts: dict[DriftAction, int] = {"generated_ids": 0, "new_branch": 0, "rendered_anew": 0}
    for one in _all_messages(calls):
        counts[one.action] += 1
    drifted = [call for call in calls if call.messages]
    return DriftReport(session_id=session_id, calls=len(calls), drift=drifted, counts=counts)


def _all_messages(calls: Iterable[CallDrift]) -> Iterator[MessageDrift]:
    return (message for call in calls for message in call.messages)


def _drift_of(
    place: int, message: ChatMessage, action: DriftAction, fields: list[str], recorded: ChatMessage | None
) -> MessageDrift:
    # No answer can be written with half of a surrogate pair, which the JSON of a call can spell.
    received = escaped_half_surrogates(shown_text(message))
    there = None if recorded is None else escaped_half_surrogates(shown_text(recorded))
    start = max(_first_difference(received, there) - _SHOWN_BEFORE, 0) if there is not None else 0
    part = slice(start, start + LONGEST_DRIFT_TEXT)
    return MessageDrift(
        message=place,
        role=str(message.get("role")),
        action=action,
        fields=fields,
        recorded=None if there is None else there[part],
        received=received[part],
    )


def _first_difference(text: str, other: str) -> int:
    pairs = zip(text, other, strict=False)
    return next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(text), len(other)))
