"""Tools by JSON schema: which calls are permitted, and what answers them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jsonschema_rs

from rollout_env import AnyCall, ChatMessage, JsonObject, MalformedCall

_NO_PARAMETERS: JsonObject = {"type": "object"}
LONGEST_RESULT = 4000
"""Characters of a tool's result that the model gets to see."""


class ToolInvalid(ValueError):
    """A tool has no valid name or schema. The message is a part of a sentence."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function as the chat template shows it, and what computes its results."""

    schema: JsonObject
    """`{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`; the part under
    `function` alone will do."""
    run: Callable[..., object]
    """Gets the arguments by name. What it raises is answered to the model as an error."""

    @property
    def function(self) -> Mapping[str, Any]:
        function = self.schema.get("function", self.schema)
        return function if isinstance(function, dict) else {}

    @property
    def name(self) -> str:
        return str(self.function.get("name", ""))


class ToolSet:
    """Some tools with different names. Threads may share it."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        """Raises `ToolInvalid` if a tool has no name, the name of another one, or parameters that are not a schema."""
        self.tools = {tool.name: tool for tool in tools}
        if "" in self.tools or len(self.tools) < len(tools):
            raise ToolInvalid(f"each tool needs a name of its own, got {[tool.name for tool in tools]}")
        self._validators = {name: _validator_of(tool) for name, tool in self.tools.items()}

    def checked(self, call: AnyCall) -> AnyCall:
        """The call; a malformed one in its place if there is no such tool, or it does not take these arguments."""
        if isinstance(call, MalformedCall):
            return call
        if call.name not in self.tools:
            known = ", ".join(self.tools) or "none"
            return MalformedCall(f"There is no tool {call.name}. The tools are: {known}.", call.name, call.id)
        error = next(iter(self._validators[call.name].iter_errors(call.arguments)), None)
        if error is None:
            return call
        place = ".".join(map(str, error.instance_path))
        where = f"arguments.{place}" if place else "arguments"
        return MalformedCall(f"The call of {call.name} is not valid: {where}: {error.message}.", call.name, call.id)

    def answer(self, call: AnyCall) -> ChatMessage:
        """Runs a call that was checked. A malformed one, and what a tool raises, are answered as errors."""
        if isinstance(call, MalformedCall):
            return tool_message(cut_result(f"Error: {call.problem}"), call)
        try:
            result = self.tools[call.name].run(**call.arguments)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except Exception as error:  # noqa: BLE001 - a tool may raise anything on what a model gives it
            text = f"Error: {error}"
        return tool_message(cut_result(text), call)


def _validator_of(tool: Tool) -> jsonschema_rs.Validator:
    """Raises `ToolInvalid`."""
    try:
        return _validator_for(json.dumps(tool.function.get("parameters") or _NO_PARAMETERS))
    except (jsonschema_rs.ValidationError, ValueError, TypeError) as error:
        raise ToolInvalid(f"the parameters of the tool {tool.name} are not a JSON schema: {error}") from error


@lru_cache(maxsize=1024)
def _validator_for(schema: str) -> jsonschema_rs.Validator:
    """The validator of a schema in JSON: the tools of a sample come again with each of its steps."""
    return jsonschema_rs.validator_for(json.loads(schema))


def cut_result(text: str) -> str:
    """The part of a result that the model gets to see."""
    return text if len(text) <= LONGEST_RESULT else f"{text[:LONGEST_RESULT]}\n[...]"


def tool_message(text: str, call: AnyCall) -> ChatMessage:
    """The answer to a call, with its id and name."""
    message: ChatMessage = {"role": "tool", "content": text}
    if call.id is not None:
        message["tool_call_id"] = call.id
    if call.name is not None:
        message["name"] = call.name
    return message
