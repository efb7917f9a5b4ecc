"""Tokens between a response and the next one: the end of a turn, messages, and a generation prompt.

The template renders the messages behind an answer that is known, the probe, and what follows the probe is the bridge.
Results of tools answer calls: templates take names and ids from the calls, and drop or refuse results without them. So
the probe makes the calls that are answered, as far as the template takes them. Their rendering is the response's own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from deployments.chat.chat_template import RENDERING_ERRORS, Chat, ChatTemplate
from deployments.protocols.chat import ChatOptions, UnsupportedTokenizer

_PROBE_TEXT = "Answer7f3a"
PROBE_QUESTION = {"role": "user", "content": "Question"}
PROBE_ANSWER = {"role": "assistant", "content": _PROBE_TEXT}
_PROBE_OBSERVATION = "Observation7f3a"
"""The chat template renders these to show how it frames a question, an answer and an observation."""
_MADE_UP_NAME = "tool"
"""Name of a call that has none: neither the response's calls nor the result that answers it."""
_NUMBER = re.compile("[0-9]+")
_MOST_SHOWN = 300
"""Characters of a rendering in a message about it."""
_MOST_SHAPES = 1000
"""Shapes of observations that are remembered: which roles follow one another, with which fields."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """The text between a response and the next one."""

    text: str
    ends: Sequence[int]
    """The index in `text` at which each of its messages but the last one ends."""


@dataclass(frozen=True, slots=True)
class _ProbeEnd:
    """How a template writes the end of a probe."""

    count: int
    """How often the text of a probe stands in it."""
    closing: str
    """Text that closes its last call."""

    def end_in(self, text: str) -> int | None:
        """The index in a rendering at which the probe ends; `None` if it is not there."""
        *before, after = text.split(_PROBE_TEXT, self.count)
        if self.count == 0 or len(before) < self.count or not after.startswith(self.closing):
            return None
        return len(text) - len(after) + len(self.closing)


_KeptProbe = tuple[int, _ProbeEnd]
"""The probe that a template takes before messages of one shape, by its number, and its end."""


class Bridges:
    """Renders bridges with one chat template. Threads may share it."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._kept_by_shape: dict[int, _KeptProbe] = {}
        self.end_tokens: Sequence[str] = ()
        """The tokens that end a response. They separate its calls from the end of its turn."""

    def bridge(self, messages: Chat, calls: Chat, options: ChatOptions) -> Bridge:
        """The text after a response with `calls` when it is observed with `messages`.

        Raises:
            UnsupportedTokenizer: the template refuses the messages behind an answer, drops what one says, or numbers
                the calls of the whole conversation.
        """
        chat, text, start = self._rendered(messages, calls, options)
        ends = self._template.cuts(chat, text, options, first=len(chat) - len(messages))
        return Bridge(text[start:], [max(end - start, 0) for end in ends])

    def content_end(self, messages: Chat, calls: Chat, options: ChatOptions) -> int:
        """The index in their bridge at which the content of the last message ends, if more of it followed."""
        *before, last = messages
        marked = {**last, "content": last["content"] + _PROBE_OBSERVATION}
        _, text, start = self._rendered([*before, marked], calls, options)
        return text.index(_PROBE_OBSERVATION, start) - start

    def end_of_answer(self) -> str:
        """The text that the template puts after a final answer; empty if it refuses such an answer."""
        try:
            text = self._template.render([PROBE_QUESTION, PROBE_ANSWER], ChatOptions(), False)
        except RENDERING_ERRORS:
            return ""
        return text.rpartition(_PROBE_TEXT)[2]

    def _rendered(self, messages: Chat, calls: Chat, options: ChatOptions) -> tuple[Chat, str, int]:
        """The messages behind a probe, their rendering, and the index in it at which the bridge begins."""
        candidates = _probes(messages, calls)
        # Hashed, because an observation may have thousands of messages.
        shape = hash(
            (
                *((message["role"], *sorted(message), _shape_of(message["content"])) for message in messages),
                *(len(probe.get("tool_calls", ())) for probe in candidates),
                options.tools is None,
                str(options.chat_template_kwargs),
            )
        )
        kept = self._kept_by_shape.get(shape)
        if kept is None:
            kept = self._kept_by(messages, candidates, options)
            if len(self._kept_by_shape) >= _MOST_SHAPES:
                self._kept_by_shape.clear()
            self._kept_by_shape[shape] = kept
        number, end = kept
        probe = candidates[number]
        chat = [PROBE_QUESTION, probe, *messages]
        try:
            text = self._template.render(chat, options)
            # Some templates write ids where they close a call.
            start = end.end_in(text) or self._end_of(probe, options).end_in(text)
        except RENDERING_ERRORS as error:
            raise _refusal(messages, error) from error
        if start is None:
            raise _changed_answer(text)
        return chat, text, start

    def _kept_by(self, messages: Chat, candidates: Chat, options: ChatOptions) -> _KeptProbe:
        """The first of the probes behind which the template writes all that the messages say.

        It depends on the roles and fields of the messages, not on what they say.
        """
        texts = [f"{_PROBE_OBSERVATION}{number}." if _says(message) else "" for number, message in enumerate(messages)]
        marked = [_saying(message, text) for message, text in zip(messages, texts, strict=True)]
        problem: Exception | None = None
        for number, probe in enumerate(candidates):
            try:
                text = self._template.render([PROBE_QUESTION, probe, *marked], options)
                end = self._end_of(probe, options)
            except RENDERING_ERRORS as error:
                problem = _refusal(messages, error)
                continue
            start = end.end_in(text)
            if start is None:
                problem = _changed_answer(text)
                continue
            # What an assistant says beside its calls is left out by some families, and not news to the model.
            dropped = [
                message["role"]
                for message, said in zip(marked, texts, strict=True)
                if message["role"] != "assistant" and said not in text[start:]
            ]
            if not dropped:
                self._refuse_numbered_calls(probe, marked, text[start:], options)
                return number, end
            problem = UnsupportedTokenizer(
                f"The model's chat template drops messages of role {dropped[0]!r} after an answer: the model would not "
                f"see what they say, but {text[start:][:_MOST_SHOWN]!r}. Send them with another role, such as 'user'."
            )
        assert problem is not None
        raise problem

    def _refuse_numbered_calls(
        self, probe: Mapping[str, Any], messages: Chat, bridge: str, options: ChatOptions
    ) -> None:
        """Raises `UnsupportedTokenizer` if the template numbers calls through the conversation, as Command R7B's."""
        if "tool_calls" not in probe:
            return
        calls = [{**call, "id": f"past{place:05}"} for place, call in enumerate(probe["tool_calls"])]
        results = [{"role": "tool", "content": _PROBE_TEXT, "tool_call_id": call["id"]} for call in calls]
        earlier = [{**probe, "tool_calls": calls}, *results]
        try:
            twice = self._template.render([PROBE_QUESTION, *earlier, probe, *messages], options)
        except RENDERING_ERRORS:
            return
        if not twice.endswith(bridge) and _NUMBER.sub("", twice).endswith(_NUMBER.sub("", bridge)):
            raise UnsupportedTokenizer(
                "The model's chat template numbers the calls of the whole conversation, and a result of a tool needs "
                "the number of its call. Send results with role 'user', or take a template that writes ids of calls."
            )

    def _end_of(self, probe: Mapping[str, Any], options: ChatOptions) -> _ProbeEnd:
        if "tool_calls" not in probe:
            return _ProbeEnd(1, "")
        head = self._template.render([PROBE_QUESTION, probe], options, False)
        alone = self._template.render([PROBE_QUESTION, PROBE_ANSWER], options, False)
        closing = self._closing(head.rpartition(_PROBE_TEXT)[2], alone.rpartition(_PROBE_TEXT)[2])
        return _ProbeEnd(head.count(_PROBE_TEXT), closing)

    def _closing(self, after_calls: str, after_answer: str) -> str:
        """The part of what follows the last argument of the calls that closes the calls: their turn ends after it."""
        if after_answer.strip() and after_calls.endswith(after_answer):
            return after_calls.removesuffix(after_answer)
        ends = [place for token in self.end_tokens if (place := after_calls.rfind(token)) >= 0]
        return after_calls[: max(ends)] if ends else after_calls


def _shape_of(content: str | Sequence[Mapping[str, Any]]) -> object:
    """The kinds of a message's parts, for a message that shows images between them; else whether it has a text."""
    return bool(content) if isinstance(content, str) else tuple(part["type"] for part in content)


def _says(message: Mapping[str, Any]) -> bool:
    """Whether the message has a text."""
    content = message["content"]
    return bool(content) if isinstance(content, str) else any("text" in part for part in content)


def _saying(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The message with this text in the place of each of its own."""
    content = message["content"]
    if not isinstance(content, str):
        return {**message, "content": [{**part, "text": text} if "text" in part else part for part in content]}
    return {**message, "content": text}


def _refusal(messages: Chat, error: Exception) -> UnsupportedTokenizer:
    roles = " and ".join(dict.fromkeys(repr(message["role"]) for message in messages))
    return UnsupportedTokenizer(f"The model's chat template refuses a message of role {roles} after an answer: {error}")


def _changed_answer(text: str) -> UnsupportedTokenizer:
    return UnsupportedTokenizer(f"The model's chat template does not keep an answer as it is: {text[:_MOST_SHOWN]!r}")


def _probes(messages: Chat, calls: Chat) -> list[Mapping[str, Any]]:
    """Answers behind which the messages may stand, the likeliest first."""
    results = list(takewhile(lambda message: message["role"] == "tool", messages))
    if not results:
        return [PROBE_ANSWER]
    answered = _answered_calls(results, calls)
    made = [(str(call.get("id") or ""), _name_of(call)) for call in calls]
    are_known = {id_ for id_, _ in answered} <= {id_ for id_, _ in made}
    # Some templates write an answer's text after the results of its calls.
    return [
        {"role": "assistant", "content": content, "tool_calls": [_call_of(*each, arguments) for each in named]}
        for named in ([made, answered] if are_known and made != answered else [answered])
        for content in ("", _PROBE_TEXT)
        # Templates that write JSON take arguments as text, others as an object, as vLLM hands them over.
        for arguments in ({"argument": _PROBE_TEXT}, f'{{"argument": "{_PROBE_TEXT}"}}')
    ] + [PROBE_ANSWER]


def _answered_calls(results: Chat, calls: Chat) -> list[tuple[str, str]]:
    """The id and the name of the call that each result answers: the call of its id, or else the one in its place."""
    by_id = {call.get("id"): call for call in calls}
    answered = []
    for place, result in enumerate(results):
        in_place = calls[place] if place < len(calls) else {}
        call = by_id.get(result.get("tool_call_id"), in_place)
        id_ = result.get("tool_call_id") or call.get("id") or f"call{place:05}"
        answered.append((str(id_), _name_of(call) if call else str(result.get("name") or _MADE_UP_NAME)))
    return answered


def _call_of(id_: str, name: str, arguments: object) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _name_of(call: Mapping[str, Any]) -> str:
    return str((call.get("function") or call).get("name") or _MADE_UP_NAME)
