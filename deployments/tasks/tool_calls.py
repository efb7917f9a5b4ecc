"""Questions that need tools, and single calls that must be the expected ones; tools by JSON schema."""

import ast
import importlib
import json
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Self

import jsonschema_rs
from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, field_validator, model_validator

from deployments.tasks.replies import boxed_or_whole, text_outcome
from deployments.tasks.support import json_equal
from rollout_env import (
    AnyCall,
    ChatMessage,
    JsonObject,
    MalformedCall,
    Reference,
    StepOutcome,
    TaskEnvironment,
    reply_text,
    tool_calls_of,
)
from rollout_env.tool_calls import written_call

_LONGEST_EXPRESSION = 200
"""Bounds the digits of the value too."""
_LARGEST_OPERAND = 999
_OPERATORS: dict[type[ast.operator | ast.unaryop], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_NO_RESULT = "Error: no result is known for these arguments."
TOO_MANY = "The calls were not made: no more are permitted."
_NO_PARAMETERS: JsonObject = {"type": "object"}
LONGEST_RESULT = 4000
"""Characters of a tool's result that the model gets to see."""


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
        """Raises `ValueError` if a tool has no name, the name of another one, or parameters that are not a schema."""
        self.tools = {tool.name: tool for tool in tools}
        if "" in self.tools or len(self.tools) < len(tools):
            raise ValueError(f"each tool needs a name of its own, got {[tool.name for tool in tools]}")
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
    """Raises `ValueError`."""
    try:
        return _validator_for(json.dumps(tool.function.get("parameters") or _NO_PARAMETERS))
    except (jsonschema_rs.ValidationError, ValueError, TypeError) as error:
        raise ValueError(f"the parameters of the tool {tool.name} are not a JSON schema: {error}") from error


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


class _ToolSettings(BaseModel):
    """A tool that all samples have."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    parameters: JsonObject = {"type": "object", "properties": {}}
    """JSON schema of the arguments."""
    function: str
    """`package.module:function` of what computes the result. It gets the arguments by name, and may block."""

    def tool(self) -> Tool:
        """Raises `ImportError` or `AttributeError` if there is no such function."""
        module, _, name = self.function.partition(":")
        schema = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return Tool({"type": "function", "function": schema}, getattr(importlib.import_module(module), name))


_CALCULATOR = _ToolSettings(
    name="calculator",
    description="Evaluates an arithmetic expression.",
    parameters={"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    function="deployments.tasks.tool_calls:calculate",
)


class _ExpectedCall(BaseModel):
    """A call that a sample wants, and what answers it if no tool computes that."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str
    arguments: JsonObject = {}
    result: str = "ok"


class _ToolCallsInfo(BaseModel):
    """The `extra_env_info` of a sample; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    ground_truth: StrictStr | StrictInt | StrictFloat | None = None
    """The right answer of the reply that makes no call. Without it the sample has one turn, whose calls are judged."""
    expected_calls: Annotated[list[_ExpectedCall], Field(max_length=64)] = []
    """The calls that must be made, in any order: all of them, and without `ground_truth` no others."""
    tools: Annotated[list[JsonObject], Field(max_length=128)] = []
    """Schemas of further tools, whose results are those of `expected_calls`. For the model to see them, they belong
    into `tools` of the sample too."""
    made: list[int] = []
    """Places in `expected_calls` of those that were made."""
    calls: int = 0
    """How many were made so far, malformed ones too."""

    @field_validator("tools")
    @classmethod
    def _have_schemas(cls, tools: list[JsonObject]) -> list[JsonObject]:
        ToolSet([Tool(schema, str) for schema in tools])
        return tools

    @model_validator(mode="after")
    def _wants_something(self) -> Self:
        if self.ground_truth is None and not self.expected_calls:
            raise ValueError("a sample needs ground_truth, expected_calls, or both")
        return self


class ToolCallsEnvironment(TaskEnvironment):
    """Runs the calls of each reply, until a reply makes none, whose answer is judged.

    Calls are those that the service has parsed, or those in the text, in any of the common formats. A malformed call
    (not JSON, an unknown tool, arguments against the schema) is answered with what is wrong, and counted.
    """

    description: ClassVar[str] = "Questions to answer with tools, and single calls to make as expected."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = _ToolCallsInfo

    def __init__(
        self,
        tools: Sequence[_ToolSettings] = (_CALCULATOR,),
        malformed_reward: Annotated[float, Field(le=0)] = 0.0,
        most_calls: Annotated[int, Field(ge=1)] = 16,
    ) -> None:
        """Checks the tools.

        Args:
            tools: tools of all samples, for the chat template too; by default a calculator.
            malformed_reward: reward of each malformed call, under the name `malformed`.
            most_calls: calls of one rollout. A reply beyond them ends it.

        Raises:
            ValueError: the tools' names or schemas are not valid.
        """
        self._own = [settings.tool() for settings in tools]
        self._tool_set = ToolSet(self._own)
        self.tools = [tool.schema for tool in self._own]
        self.malformed_reward = malformed_reward
        self.most_calls = most_calls

    def step(self, message_log: list[ChatMessage], extra_env_info: _ToolCallsInfo) -> StepOutcome:
        """Answers the calls of the reply, or judges it if it makes none."""
        info, reply = extra_env_info, message_log[-1]
        calls = tool_calls_of(reply, [*self.tools, *info.tools])
        if not calls:
            return self._judged(reply_text(reply), info)
        if info.calls + len(calls) > self.most_calls:
            return text_outcome(TOO_MANY, {"correct": 0.0}, terminated=True)
        tools = self._tools_of(info)
        calls = [*map(tools.checked, calls)]
        expected = _matched(calls, info)
        malformed = sum(isinstance(call, MalformedCall) for call in calls)
        done = info.ground_truth is None
        right = done and len(expected) == len(calls) == len(info.expected_calls)
        rewards = {"correct": float(right)}
        if self.malformed_reward:
            rewards["malformed"] = self.malformed_reward * malformed
        made = info.model_copy(update={"made": [*info.made, *expected.values()], "calls": info.calls + len(calls)})
        return StepOutcome(
            [self._answer(call, tools, info, expected.get(place)) for place, call in enumerate(calls)],
            rewards,
            terminated=done,
            metadata=made.model_dump(),
            metrics={"calls": len(calls), "malformed_calls": malformed},
        )

    def _judged(self, text: str, info: _ToolCallsInfo) -> StepOutcome:
        answer = boxed_or_whole(text)
        all_made = len(info.made) == len(info.expected_calls)
        right = answer != "" and info.ground_truth is not None and answer == str(info.ground_truth).strip() and all_made
        said = "correct" if right else "incorrect"
        return text_outcome(f"Environment: {said}.", {"correct": float(right)}, terminated=True, answer=answer or None)

    def _tools_of(self, info: _ToolCallsInfo) -> ToolSet:
        """All tools, and further ones of the sample."""
        further = [Tool(schema, str) for schema in info.tools]
        return ToolSet([*self._own, *(tool for tool in further if tool.name not in self._tool_set.tools)])

    def _answer(self, call: AnyCall, tools: ToolSet, info: _ToolCallsInfo, expected: int | None) -> ChatMessage:
        """The answer to a checked call: what its sample says, for a tool that only the sample has."""
        if isinstance(call, MalformedCall) or call.name in self._tool_set.tools:
            return tools.answer(call)
        return tool_message(_NO_RESULT if expected is None else info.expected_calls[expected].result, call)

    def reference(self, sample: Mapping[str, Any]) -> Reference:
        """The calls that are expected, in one reply, and then the ground truth."""
        info = _ToolCallsInfo(**sample["extra_env_info"])
        calls = [written_call(call.name, call.arguments) for call in info.expected_calls]
        truth = [] if info.ground_truth is None else [str(info.ground_truth)]
        return Reference([*(["\n".join(calls)] if calls else []), *truth])

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Calculations for the calculator, with numbers of up to three digits, all different."""
        draw = random.Random(seed)
        numbers = range(1, _LARGEST_OPERAND + 1)
        drawn = draw.sample(range(len(numbers) ** 2), count)
        return [_calculation(*divmod(number, len(numbers)), draw.choice("+-*")) for number in drawn]


def _calculation(left: int, right: int, sign: str) -> dict[str, Any]:
    expression = f"{left + 1} {sign} {right + 1}"
    return {
        "messages": [{"role": "user", "content": f"What is {expression}?"}],
        "extra_env_info": {"ground_truth": calculate(expression)},
    }


def _matched(calls: Sequence[AnyCall], info: _ToolCallsInfo) -> dict[int, int]:
    """For places of the calls that were expected, the places in `expected_calls`; each of these once."""
    left = {place: call for place, call in enumerate(info.expected_calls) if place not in info.made}
    found: dict[int, int] = {}
    for place, call in enumerate(calls):
        for other, wanted in left.items():
            if isinstance(call, MalformedCall) or call.name != wanted.name:
                continue
            if json_equal(call.arguments, wanted.arguments):
                found[place] = other
                del left[other]
                break
    return found


def calculate(expression: str) -> str:
    """The value of sums, differences, products and quotients of numbers.

    Raises:
        ValueError: it is something else, too long or infinite.
        ZeroDivisionError: it divides by zero.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"the expression is longer than {_LONGEST_EXPRESSION} characters")
    try:
        value = _value_of(ast.parse(expression.strip(), mode="eval").body)
        return str(int(value) if value == int(value) else value)
    except (SyntaxError, RecursionError, MemoryError, OverflowError) as error:
        raise ValueError(f"this is not an arithmetic expression: {expression}") from error


def _value_of(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value_of(operand))
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value_of(left), _value_of(right))
    raise ValueError("only numbers, +, -, *, /, //, % and brackets are known")
