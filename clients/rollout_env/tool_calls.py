"""Reads the tool calls of a response: those that the service has parsed, else those in its text.

Text is read in the formats that most models write: Hermes and Qwen (`<tool_call>` around JSON), Qwen Coder
(`<function=`), Mistral (`[TOOL_CALLS]`), Llama (JSON objects and nothing else), and Python (`[add(a=1)]` and nothing
else).

A format finds where calls are and reads each by `_attempted`: what raises is a malformed call, and the others are read.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollout_env.records import ChatMessage, JsonObject, escaped_half_surrogates
from rollout_env.tool_parameters import LONGEST_LITERAL, typed_arguments

HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^<>\s]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER, END_OF_PARAMETER = re.compile(r"<parameter=([^<>\s]*)>"), "</parameter>"
MISTRAL, LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
MISTRAL_CALL = re.compile(r"\s*([A-Za-z0-9_.\-]+)(?:\[ARGS\])?\s*(?=\{)")
PYTHON = re.compile(r"\[\s*[A-Za-z_][\w.]*\(.*\)\s*\]", re.DOTALL)
BETWEEN_CALLS = "; \n\t"
MOST_NESTED = 100
"""Levels of lists and objects in the arguments of a call: who checks or sends them on goes through them recursively."""
MOST_CALLS = 1024
"""Calls of one response that are read. One malformed call stands for all behind them."""
LONGEST_QUOTE = 200


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call. Its tool may not exist, or not take these arguments."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """Value for the `tool_call_id` of the answer; `None` if neither service nor model gave one."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Text in place of a call that cannot be read as one."""

    problem: str
    """Sentence for the model that says what is wrong."""
    name: str | None = None
    id: str | None = None


AnyCall = ToolCall | MalformedCall
Tools = Iterable[Mapping[str, Any]]


class _CallUnreadable(ValueError):
    """Text in place of a call cannot be read as one. The message is a sentence for the model."""

    def __init__(self, problem: str, name: str | None = None) -> None:
        super().__init__(problem)
        self.name = name


def tool_calls_of(message: ChatMessage, tools: Tools = ()) -> list[AnyCall]:
    """The calls of a response, in order; empty if it makes none. Raises nothing, whatever the response is made of.

    Calls of the service's parser (`responses.tool_call_parser` of its config) go before those in the text.

    Args:
        tools: those that the model may call, with their JSON schemas, as in `TaskEnvironment.tools`. Qwen Coder's
            format has no types: the values in it are read by the schema of their tool, and are text without one.
    """
    calls: list[AnyCall] = []
    try:
        for call in _found_in(message, tools):
            if len(calls) == MOST_CALLS:
                raise _CallUnreadable(f"A response makes at most {MOST_CALLS} calls. Those behind them were not read.")
            calls.append(call)
    except Exception as error:  # noqa: BLE001 - finding calls raises anything on what a model writes
        calls.append(_malformed(error))
    return calls


def _attempted(read: Callable[..., ToolCall], *given: Any) -> AnyCall:
    """The call that `read` makes of what is given; a malformed one if it raises."""
    try:
        return read(*given)
    except Exception as error:  # noqa: BLE001 - reading raises anything on what a model writes
        return _malformed(error)


def _malformed(error: Exception) -> MalformedCall:
    """The problem as text that can be written: what a model wrote may spell half of a surrogate pair."""
    if isinstance(error, _CallUnreadable):
        name = None if error.name is None else escaped_half_surrogates(error.name)
        return MalformedCall(escaped_half_surrogates(str(error)), name)
    problem = _shortened(f"{type(error).__name__}: {error}")
    return MalformedCall(escaped_half_surrogates(f"The call could not be read: {problem}"))


def _found_in(message: ChatMessage, tools: Tools) -> Iterator[AnyCall]:
    if given := message.get("tool_calls"):
        yield from map(_call_of_record, given)
        return
    has_calls = False
    for call in _calls_in_text(_without_thought(message["content"]), tools):
        has_calls = True
        yield call
    if not has_calls and (problem := message.get("parse_error")) is not None:
        raise _CallUnreadable(f"The call could not be read: {problem}")


def reply_text(message: ChatMessage) -> str:
    """The text of a response without reasoning, and without calls if the service has parsed them."""
    return message.get("parsed_content") or _without_thought(message["content"])


def _without_thought(text: str) -> str:
    """The text after the last `</think>`; empty if a thought at the beginning never ends."""
    _, end, after = text.rpartition("</think>")
    if end:
        return after
    return "" if text.lstrip().startswith("<think>") else text


def _call_of_record(record: Any) -> AnyCall:
    """A call in OpenAI's form, or without the `function` around its name and arguments."""
    fields = record if isinstance(record, dict) else {"function": record}
    id_ = fields.get("id")
    return replace(_attempted(_call_of, fields.get("function", fields)), id=id_ if isinstance(id_, str) else None)


def _calls_in_text(text: str, tools: Tools) -> Iterator[AnyCall]:
    """The calls in a text of one of the formats. A text that is an answer has none."""
    stripped = text.strip()
    if "<tool_call>" in text:
        for body in HERMES.findall(text):
            yield from _function_calls(body, tools) if "<function=" in body else (_attempted(_call_of_json, body),)
    elif "<function=" in text:
        yield from _function_calls(text, tools)
    elif MISTRAL in text:
        yield from _mistral_calls(text.partition(MISTRAL)[2])
    elif LLAMA in text or stripped.startswith("{"):
        yield from _llama_calls(stripped.removeprefix(LLAMA).strip(), is_marked=LLAMA in text)
    elif PYTHON.fullmatch(stripped):
        yield from _python_calls(stripped)


def _decoded(text: str, subject: str, place: int = 0, name: str | None = None) -> tuple[Any, int]:
    """The JSON that begins at this place, and where it ends. `subject` begins the sentence for what is none."""
    try:
        return json.JSONDecoder().raw_decode(text, place)
    except (ValueError, RecursionError) as error:
        raise _CallUnreadable(f"{subject} not valid JSON: {error}.", name) from error


def _decoded_whole(text: str, subject: str, name: str | None = None) -> Any:
    """The JSON that the text is."""
    stripped = text.strip()
    value, end = _decoded(stripped, subject, name=name)
    if end < len(stripped):
        raise _CallUnreadable(f"{subject} not valid JSON: there is text behind it.", name)
    return value


def _call_of_json(text: str) -> ToolCall:
    return _call_of(_decoded_whole(text, "The call is"))


def _call_of(value: Any) -> ToolCall:
    """A call from an object with a name and arguments, which may be JSON text."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise _CallUnreadable(f"A call must be a JSON object with a name and arguments, got {_shortened(repr(value))}")
    name = value["name"]
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _decoded_whole(arguments, f"The arguments of {name} are", name)
    if not isinstance(arguments, dict):
        raise _CallUnreadable(f"The arguments of {name} must be a JSON object.", name)
    return checked_call(name, arguments)


def checked_call(name: str, arguments: dict[str, Any]) -> ToolCall:
    """A call whose arguments are JSON: no NaN, no set, no lone surrogate, all of which texts can spell.

    Other values, and deeper ones than `MOST_NESTED`, could be neither checked by a schema nor sent on.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise _CallUnreadable(f"The name of a call must be text, got {_shortened(ascii(name))}") from error
    if _is_too_deep(arguments):
        raise _CallUnreadable(f"The arguments of {name} are nested deeper than {MOST_NESTED} levels.", name)
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError) as error:
        raise _CallUnreadable(f"The arguments of {name} have a value that JSON does not have.", name) from error
    return ToolCall(name, json.loads(text))


def _is_too_deep(value: Any) -> bool:
    """Whether lists and objects stand in one another more than `MOST_NESTED` times; goes level by level."""
    level = [value]
    for _ in range(MOST_NESTED):
        nested = [each.values() if isinstance(each, dict) else each for each in level]
        level = [part for parts in nested for part in parts if isinstance(part, (dict, list, tuple))]
        if not level:
            return False
    return True


def _function_calls(text: str, tools: Tools) -> Iterator[AnyCall]:
    """Calls with a tag for each parameter."""
    for name, body in FUNCTION.findall(text):
        yield _attempted(_function_call, name, body, tools)


def _function_call(name: str, body: str, tools: Tools) -> ToolCall:
    if not name:
        raise _CallUnreadable("The call names no function.")
    return checked_call(name, typed_arguments(dict(_parameters_of(body)), name, tools))


def _parameters_of(body: str) -> Iterator[tuple[str, str]]:
    """Names and texts of the parameters that have an end, in a time that is proportional to the length.

    Each text stands between two line breaks: others belong to it.
    """
    place = 0
    while (opened := PARAMETER.search(body, place)) is not None:
        end = body.find(END_OF_PARAMETER, opened.end())
        if end < 0:
            return
        yield opened[1], body[opened.end() : end].removeprefix("\n").removesuffix("\n")
        place = end + len(END_OF_PARAMETER)


def _mistral_calls(text: str) -> Iterator[AnyCall]:
    """A JSON list of calls, or the names of functions, each followed by its arguments as JSON."""
    if text.lstrip().startswith("["):
        values, _ = _decoded(text.lstrip(), "The calls are")
        yield from (_attempted(_call_of, value) for value in values)
        return
    for part in text.split(MISTRAL):
        yield _attempted(_mistral_call, part)


def _mistral_call(text: str) -> ToolCall:
    named = MISTRAL_CALL.match(text)
    if named is None:
        raise _CallUnreadable(f"The call has no name with arguments: {_shortened(text.strip())}")
    arguments, _ = _decoded(text, f"The arguments of {named[1]} are", named.end(), named[1])
    return _call_of({"name": named[1], "arguments": arguments})


def _llama_calls(text: str, is_marked: bool) -> Iterator[AnyCall]:
    """JSON objects, separated by `;`. Without the marker, only text that is calls from end to end is read as such."""
    if not is_marked:
        try:
            values = list(_json_values(text))
        except _CallUnreadable:
            return
        if not all(isinstance(each, dict) and "name" in each and each.keys() & ARGUMENT_KEYS for each in values):
            return
    yield from (_attempted(_call_of, value) for value in _json_values(text))


def _json_values(text: str) -> Iterator[Any]:
    place = 0
    while place < len(text):
        value, place = _decoded(text, "The call is", place)
        yield value
        while place < len(text) and text[place] in BETWEEN_CALLS:
            place += 1


ARGUMENT_KEYS = {"arguments", "parameters"}
"""Keys of which a call has one, in contrast to an answer that is JSON."""


def _python_calls(text: str) -> Iterator[AnyCall]:
    """A Python list of calls with keyword arguments that are literals."""
    try:
        if len(text) > LONGEST_LITERAL:
            raise ValueError(f"they are longer than {LONGEST_LITERAL} characters")
        listed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _CallUnreadable(f"The calls are not a valid Python list: {error}.") from error
    yield from (_attempted(_python_call, call) for call in (listed.elts if isinstance(listed, ast.List) else []))


def _python_call(call: ast.expr) -> ToolCall:
    parts: list[str] = []
    function = call.func if isinstance(call, ast.Call) else call
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not isinstance(call, ast.Call) or not isinstance(function, ast.Name):
        raise _CallUnreadable("Each element of the list must be a call, such as add(a=1).")
    name = ".".join([function.id, *reversed(parts)])
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise _CallUnreadable(f"The arguments of {name} must have names.", name)
    try:
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise _CallUnreadable(f"The arguments of {name} must be literals.", name) from error
    return checked_call(name, arguments)


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."


def written_call(name: str, arguments: JsonObject) -> str:
    """The call as text, in the format of Hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
