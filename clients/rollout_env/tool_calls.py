"""Reads the tool calls of a response: those that the service has parsed, else those in its text.

Text is read in the formats that most models write: Hermes and Qwen (`<tool_call>` around JSON), Qwen Coder
(`<function=`), Mistral (`[TOOL_CALLS]`), Llama (JSON objects and nothing else), and Python (`[add(a=1)]` and nothing
else).
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rollout_env.records import ChatMessage

HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^<>\s]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER, END_OF_PARAMETER = re.compile(r"<parameter=([^<>\s]*)>"), "</parameter>"
MISTRAL, LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
MISTRAL_CALL = re.compile(r"\s*([A-Za-z0-9_.\-]+)(?:\[ARGS\])?\s*(?=\{)")
PYTHON = re.compile(r"\[\s*[A-Za-z_][\w.]*\(.*\)\s*\]", re.DOTALL)
BETWEEN_CALLS = "; \n\t"
LONGEST_PYTHON = 20_000
"""Limit in characters: Python's parser takes memory in proportion, and can fail on deep nesting."""
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


def tool_calls_of(message: ChatMessage) -> list[AnyCall]:
    """The calls of a response, in order; empty if it makes none.

    Calls of the service's parser (`responses.tool_call_parser` of its config) go before those in the text.
    """
    if given := message.get("tool_calls"):
        return [call_of_record(record) for record in given]
    calls = list(calls_in_text(without_thought(message["content"])))
    if not calls and (problem := message.get("parse_error")) is not None:
        return [MalformedCall(f"The call could not be read: {problem}")]
    return calls


def reply_text(message: ChatMessage) -> str:
    """The text of a response without reasoning, and without calls if the service has parsed them."""
    return message.get("parsed_content") or without_thought(message["content"])


def without_thought(text: str) -> str:
    """The text after the last `</think>`; empty if a thought at the beginning never ends."""
    _, end, after = text.rpartition("</think>")
    if end:
        return after
    return "" if text.lstrip().startswith("<think>") else text


def call_of_record(record: Any) -> AnyCall:
    """A call in OpenAI's form, or without the `function` around its name and arguments."""
    function = record.get("function", record) if isinstance(record, dict) else record
    call = call_of(function)
    id_ = record.get("id") if isinstance(record, dict) else None
    return replace(call, id=id_) if isinstance(id_, str) else call


def calls_in_text(text: str) -> Iterator[AnyCall]:
    """The calls in a text of one of the formats. A text that is an answer has none."""
    stripped = text.strip()
    if "<tool_call>" in text:
        for body in HERMES.findall(text):
            yield from function_calls(body) if "<function=" in body else (call_of_json(body),)
    elif "<function=" in text:
        yield from function_calls(text)
    elif MISTRAL in text:
        yield from mistral_calls(text.partition(MISTRAL)[2])
    elif LLAMA in text or stripped.startswith("{"):
        yield from llama_calls(stripped.removeprefix(LLAMA).strip(), is_marked=LLAMA in text)
    elif PYTHON.fullmatch(stripped):
        yield from python_calls(stripped)


def call_of_json(text: str) -> AnyCall:
    try:
        return call_of(json.loads(text))
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"The call is not valid JSON ({error}): {shortened(text.strip())}")


def call_of(value: Any) -> AnyCall:
    """A call from an object with a name and arguments, which may be JSON text."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return MalformedCall(f"A call must be a JSON object with a name and arguments, got {shortened(repr(value))}")
    name = value["name"]
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return MalformedCall(f"The arguments of {name} are not valid JSON: {error}.", name)
    if not isinstance(arguments, dict):
        return MalformedCall(f"The arguments of {name} must be a JSON object.", name)
    return checked_call(name, arguments)


def checked_call(name: str, arguments: dict[str, Any]) -> AnyCall:
    """A call whose arguments are JSON: no NaN, no set, no lone surrogate, all of which texts can spell.

    Other values could be neither checked by a schema nor sent on.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return MalformedCall(f"The name of a call must be text, got {shortened(ascii(name))}")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError):
        return MalformedCall(f"The arguments of {name} have a value that JSON does not have.", name)
    return ToolCall(name, json.loads(text))


def function_calls(text: str) -> Iterator[AnyCall]:
    """Calls with a tag for each parameter. A value that is JSON is taken as JSON, except for a text in quotes."""
    for name, body in FUNCTION.findall(text):
        if not name:
            yield MalformedCall("The call names no function.")
            continue
        values = {parameter: value.strip("\n") for parameter, value in parameters_of(body)}
        yield checked_call(name, {parameter: value_of(value) for parameter, value in values.items()})


def parameters_of(body: str) -> Iterator[tuple[str, str]]:
    """Names and texts of the parameters that have an end, in a time that is proportional to the length."""
    place = 0
    while (opened := PARAMETER.search(body, place)) is not None:
        end = body.find(END_OF_PARAMETER, opened.end())
        if end < 0:
            return
        yield opened[1], body[opened.end() : end]
        place = end + len(END_OF_PARAMETER)


def value_of(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def mistral_calls(text: str) -> Iterator[AnyCall]:
    """A JSON list of calls, or the names of functions, each followed by its arguments as JSON."""
    if text.lstrip().startswith("["):
        try:
            values, _ = json.JSONDecoder().raw_decode(text.lstrip())
        except (ValueError, RecursionError) as error:
            yield MalformedCall(f"The calls are not a valid JSON list: {error}.")
            return
        yield from map(call_of, values)
        return
    for part in text.split(MISTRAL):
        named = MISTRAL_CALL.match(part)
        if named is None:
            yield MalformedCall(f"The call has no name with arguments: {shortened(part.strip())}")
            continue
        try:
            arguments, _ = json.JSONDecoder().raw_decode(part[named.end() :])
        except (ValueError, RecursionError) as error:
            yield MalformedCall(f"The arguments of {named[1]} are not valid JSON: {error}.", named[1])
            continue
        yield call_of({"name": named[1], "arguments": arguments})


def llama_calls(text: str, is_marked: bool) -> Iterator[AnyCall]:
    """JSON objects, separated by `;`. Without the marker, only text that is calls from end to end is read as such."""
    calls: list[AnyCall] = []
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            if is_marked:
                calls.append(MalformedCall(f"The call is not valid JSON: {error}."))
                break
            return
        if not is_marked and not (isinstance(value, dict) and "name" in value and value.keys() & ARGUMENT_KEYS):
            return
        calls.append(call_of(value))
        while place < len(text) and text[place] in BETWEEN_CALLS:
            place += 1
    yield from calls


ARGUMENT_KEYS = {"arguments", "parameters"}
"""Keys of which a call has one, in contrast to an answer that is JSON."""


def python_calls(text: str) -> Iterator[AnyCall]:
    """A Python list of calls with keyword arguments that are literals."""
    try:
        if len(text) > LONGEST_PYTHON:
            raise ValueError(f"they are longer than {LONGEST_PYTHON} characters")
        listed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield MalformedCall(f"The calls are not a valid Python list: {error}.")
        return
    for call in listed.elts if isinstance(listed, ast.List) else []:
        yield python_call(call)


def python_call(call: ast.expr) -> AnyCall:
    if not isinstance(call, ast.Call):
        return MalformedCall("Each element of the list must be a call, such as add(a=1).")
    name = ast.unparse(call.func)
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        return MalformedCall(f"The arguments of {name} must have names.", name)
    try:
        return checked_call(name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords})
    except (ValueError, TypeError, RecursionError, MemoryError):
        return MalformedCall(f"The arguments of {name} must be literals.", name)


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."
