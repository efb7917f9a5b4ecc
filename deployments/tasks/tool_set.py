"""Tools by JSON schema: which calls are permitted, and what answers them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

from rollout_env import AnyCall, ChatMessage, JsonObject, MalformedCall, ToolCall

NO_PARAMETERS: JsonObject = {"type": "object"}
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


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call and its answer."""

    call: AnyCall
    """A malformed one also if there is no such tool, or its schema does not permit the arguments."""
    message: ChatMessage

    @property
    def was_made(self) -> bool:
        return isinstance(self.call, ToolCall)


class ToolSet:
    """Some tools with different names. Threads may share it."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        """Raises `ToolInvalid` if a tool has no name, the name of another one, or parameters that are not a schema."""
        self.tools = {tool.name: tool for tool in tools}
        if "" in self.tools or len(self.tools) < len(tools):
            raise ToolInvalid(f"each tool needs a name of its own, got {[tool.name for tool in tools]}")
        self._validators = {name: validator_of(tool) for name, tool in self.tools.items()}

    def answered(self, call: AnyCall) -> AnsweredCall:
        """Runs the call, if it is one that the tools permit."""
        checked = self.checked(call)
        if isinstance(checked, MalformedCall):
            return AnsweredCall(checked, tool_message(f"Error: {checked.problem}", checked))
        try:
            result = self.tools[checked.name].run(**checked.arguments)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except Exception as error:  # noqa: BLE001 - a tool may raise anything on what a model gives it
            return AnsweredCall(checked, tool_message(f"Error: {error}", checked))
        return AnsweredCall(checked, tool_message(text, checked))

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


def validator_of(tool: Tool) -> jsonschema_rs.Validator:
    """Raises `ToolInvalid`."""
    try:
        return jsonschema_rs.validator_for(tool.function.get("parameters") or NO_PARAMETERS)
    except (jsonschema_rs.ValidationError, ValueError) as error:
        raise ToolInvalid(f"the parameters of the tool {tool.name} are not a JSON schema: {error}") from error


def tool_message(text: str, call: AnyCall) -> ChatMessage:
    """The answer to a call, cut at `LONGEST_RESULT`, with the call's id where it has one."""
    shown = text if len(text) <= LONGEST_RESULT else f"{text[:LONGEST_RESULT]}\n[...]"
    message: ChatMessage = {"role": "tool", "content": shown}
    if call.id is not None:
        message["tool_call_id"] = call.id
    if call.name:
        message["name"] = call.name
    return message
