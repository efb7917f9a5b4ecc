"""Calls out of the texts that models write, and out of those that they should not."""

import json
from keyword import iskeyword
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_env import ChatMessage, MalformedCall, ToolCall, reply_text, tool_calls_of
from rollout_env.tool_parameters import typed_arguments


def taking(**properties: Any) -> dict[str, Any]:
    """A tool whose arguments have these schemas."""
    return {"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}


TOOLS = [taking(a={"type": "integer"}, b={"type": "array"})]
ADD = {"a": 1, "b": [2.5, None, {"c": "é"}]}
ADD_JSON = json.dumps(ADD)
names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not iskeyword(name))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(alphabet="ab é\"\\{}[]<>;'\n", max_size=8),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(names, children, max_size=2),
    max_leaves=4,
)
arguments = st.dictionaries(names, values, max_size=3)
calls = st.lists(st.tuples(names, arguments), min_size=1, max_size=3)


def said(content: str, **fields: Any) -> ChatMessage:
    message: Any = {"role": "assistant", "content": content, **fields}
    return message  # type: ignore[no-any-return]


def call_of(name: str, of: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: of})


@pytest.mark.parametrize(
    "text",
    [
        f'<tool_call>\n{{"name": "add", "arguments": {ADD_JSON}}}\n</tool_call>',
        f'I add. <tool_call>{{"name": "add", "arguments": {ADD_JSON}}}',
        f'<think>Should I <tool_call>?</think><tool_call>{{"name": "add", "arguments": {ADD_JSON}}}</tool_call>',
        f"<tool_call><function=add><parameter=a>\n1\n</parameter><parameter=b>{ADD_JSON[14:-1]}</parameter></function>"
        "</tool_call>",
        f'[TOOL_CALLS][{{"name": "add", "arguments": {ADD_JSON}}}]',
        f"[TOOL_CALLS]add[ARGS]{ADD_JSON}",
        f"[TOOL_CALLS] add {ADD_JSON}",
        f'{{"name": "add", "parameters": {ADD_JSON}}}',
        f'<|python_tag|>{{"name": "add", "parameters": {ADD_JSON}}}',
        "[add(a=1, b=[2.5, None, {'c': 'é'}])]",
        json.dumps({"name": "add", "arguments": ADD_JSON}),
    ],
)
def test_one_call_is_read_out_of_every_format(text: str) -> None:
    assert tool_calls_of(said(text), TOOLS) == [ToolCall("add", ADD)]


@given(calls)
def test_any_calls_survive_their_formats(given_calls: list[tuple[str, dict[str, Any]]]) -> None:
    expected = [ToolCall(name, of) for name, of in given_calls]
    objects = [call_of(name, of) for name, of in given_calls]
    # JSON may write the markers of Hermes inside a text, where no model's parser finds them either.
    if not any("<" in text for text in objects):
        assert tool_calls_of(said("".join(f"<tool_call>{text}</tool_call>" for text in objects))) == expected
    assert tool_calls_of(said(f"[TOOL_CALLS][{', '.join(objects)}]")) == expected
    assert tool_calls_of(said("; ".join(call_of(*call, key="parameters") for call in given_calls))) == expected
    python = [f"{name}({', '.join(f'{key}={value!r}' for key, value in of.items())})" for name, of in given_calls]
    assert tool_calls_of(said(f"[{', '.join(python)}]")) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "\\ud800"}</tool_call>', "The name of a call must be text, got '\\ud800'"),
        ("<tool_call>{</tool_call>", "not valid JSON"),
        ("<tool_call>", "not valid JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "must be a JSON object with a name"),
        ("<tool_call>[1]</tool_call>", "must be a JSON object with a name"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "arguments of add must be a JSON object"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "arguments of add are not valid JSON"),
        ("<tool_call><function=></function></tool_call>", "names no function"),
        ("[TOOL_CALLS][{]", "The calls are not valid JSON"),
        ('<tool_call>{"name": "add", "arguments": {}} and</tool_call>', "there is text behind it"),
        ('{"name": "add", "arguments": "{} and"}', "arguments of add are not valid JSON: there is text"),
        ("[TOOL_CALLS]{}", "no name with arguments"),
        ("[TOOL_CALLS]add{", "arguments of add are not valid JSON"),
        ("<|python_tag|>import os", "not valid JSON"),
        ("[add(1)]", "arguments of add must have names"),
        ("[add(a=open('x'))]", "arguments of add must be literals"),
        ("[add(a=)]", "not a valid Python list"),
    ],
)
def test_what_should_be_a_call_and_is_none_says_why(text: str, problem: str) -> None:
    [call] = tool_calls_of(said(text))
    assert isinstance(call, MalformedCall)
    assert problem in call.problem


@pytest.mark.parametrize(
    "text",
    ["", "42", "The tool_call is over.", '{"answer": 42}', '{"name": "Ann", "age": 4}', "{x}", "[1, 2]", "f(x) [a]"],
)
def test_an_answer_is_no_call(text: str) -> None:
    assert tool_calls_of(said(text)) == []


def test_a_thought_that_never_ends_makes_no_calls_and_says_nothing() -> None:
    message = said('<think>I could <tool_call>{"name": "add"}</tool_call>')
    assert tool_calls_of(message) == []
    assert reply_text(message) == ""


def test_calls_of_the_services_parser_go_first_and_keep_their_ids() -> None:
    records = [
        {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": "[]"}},
        {"name": "flat", "arguments": {}},
        "no call",
    ]
    parsed = tool_calls_of(said("<tool_call>{</tool_call>", tool_calls=records))
    assert parsed[0] == ToolCall("add", {"a": 1}, "call00000")
    assert parsed[1] == MalformedCall("The arguments of add must be a JSON object.", "add", "call00001")
    assert parsed[2] == ToolCall("flat", {})
    assert isinstance(parsed[3], MalformedCall)


def test_a_parse_error_is_a_malformed_call_unless_the_text_has_calls() -> None:
    [call] = tool_calls_of(said("(call add)", parse_error="ValueError: (call"))
    assert call == MalformedCall("The call could not be read: ValueError: (call")
    assert tool_calls_of(said('{"name": "add", "parameters": {}}', parse_error="no")) == [ToolCall("add", {})]


def test_the_text_of_a_reply_is_without_calls_and_reasoning() -> None:
    assert reply_text(said("<a>Hm.</a>42", parsed_content="42", reasoning_content="Hm.")) == "42"
    assert reply_text(said("Hm.</think> 42")) == " 42"
    assert reply_text(said("42", parsed_content="", reasoning_content="42")) == "42"


markers = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<function=", "<parameter=a>", ">", "</think>", "<think>"]
others = ['"name": "f", ', '"arguments": ', "{", "}", "[", "]", "f(a=", ")", "1", "<|python_tag|>", '"', ";", "\x00"]
pieces = st.sampled_from([*markers, *others])


@given(st.lists(pieces, max_size=14).map("".join))
def test_nothing_that_a_model_writes_raises(text: str) -> None:
    for call in tool_calls_of(said(text)):
        assert isinstance(call, ToolCall | MalformedCall)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
        "[f(a=1e999)]",
        f"[f(a=0x{'f' * 5000})]",
        "[f(a=1j)]",
        "[f(a={1, 2})]",
        "[f(a=b'1')]",
        "[f(a={(1, 2): 3})]",
    ],
)
def test_a_value_that_json_does_not_have_is_a_malformed_call(text: str) -> None:
    assert tool_calls_of(said(text)) == [MalformedCall("The arguments of f have a value that JSON does not have.", "f")]


STRING, NULLABLE = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}
PAIR = {"type": "object", "properties": {"a": {"type": "boolean"}}}
TEXTS = ("101", "1.10", "true", "null", "None", '{"a": 1}', '["x"]', ' "x" ', "", " 7 ")
WITHOUT_TYPE: Any = ({}, True, None, {"description": "A"}, {"enum": ["101"]}, {"$ref": "#/no"})
FLOATS = {"1.10": 1.1, "1e3": 1000.0, "7": 7, "1e999": "1e999"}
NUMBERS = [{"type": "integer"}, {"type": ["integer"]}, {"anyOf": [{"type": "integer"}]}, {"enum": [7]}, {"const": 7}]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        *((STRING, text, text) for text in TEXTS),
        *((schema, "101", "101") for schema in WITHOUT_TYPE),
        *((schema, " 101 ", 101) for schema in NUMBERS),
        *(({"type": "integer"}, text, text) for text in ("1.5", "1,000", "007", "x", "true", "NaN", "[1]", "9" * 5000)),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "9" * 4000, int("9" * 4000)),
        *(({"type": "number"}, text, value) for text, value in FLOATS.items()),
        *(({"type": "boolean"}, text, text.lower() == "true") for text in ("true", "True", "TRUE", "false", "False")),
        *(({"type": "boolean"}, text, text) for text in ("1", "0", "yes", '"true"', "")),
        *((schema, "null", None) for schema in (NULLABLE, {"type": ["string", "null"]}, {**STRING, "nullable": True})),
        *((schema, "x", "x") for schema in (NULLABLE, {"type": ["string", "null"]}, {"enum": [None, "x"]})),
        (NULLABLE, "None", "None"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"anyOf": [{"type": "integer"}, STRING]}, "7", 7),
        ({"anyOf": [{"type": "integer"}, STRING]}, "007", "007"),
        ({"anyOf": [PAIR, STRING]}, "{'a': True}", "{'a': True}"),
        (PAIR, '{"a": true}', {"a": True}),
        (PAIR, "{'a': True, 'b': None}", {"a": True, "b": None}),
        (PAIR, "{1, 2}", "{1, 2}"),
        (PAIR, "[1]", "[1]"),
        ({"properties": {}}, "{}", {}),
        ({"items": {}}, "[1]", [1]),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"type": "array"}, "[" * 5000 + "]" * 5000, "[" * 5000 + "]" * 5000),
        ({"$ref": "#/$defs/pa~1ir"}, '{"a": true}', {"a": True}),
        ({"allOf": [{"$ref": "#/$defs/itself"}]}, "7", "7"),
    ],
)
def test_a_parameter_has_the_type_of_its_tools_schema(schema: Any, text: str, value: Any) -> None:
    definitions = {"pa/ir": PAIR, "itself": {"anyOf": [{"$ref": "#/$defs/itself"}]}}
    tool = {"name": "f", "parameters": {"properties": {"a": schema}, "$defs": definitions}}
    read = typed_arguments({"a": text}, "f", [{"name": "g"}, tool])
    assert (read, type(read["a"])) == ({"a": value}, type(value))


def test_parameters_without_a_schema_are_text() -> None:
    texts = {"a": "1", "b": "True"}
    further = {"name": "f", "parameters": {"properties": {"a": STRING}, "additionalProperties": {"type": "boolean"}}}
    odd: list[dict[str, Any]] = [{"function": "f"}, {"name": "f", "parameters": 1}]
    read = [typed_arguments(texts, "f", tools) for tools in ([], odd, [taking()], [further])]
    assert read == [*[texts] * 3, {"a": "1", "b": True}]


@given(st.text(alphabet='01.-eE{}[]"ntrufals \n', max_size=12))
def test_a_string_arrives_as_it_was_written(text: str) -> None:
    call = f"<function=add>\n<parameter=a>\n{text}\n</parameter>\n</function>"
    assert tool_calls_of(said(call), [taking(a=STRING)]) == [ToolCall("add", {"a": text})]


@given(values)
def test_a_value_of_its_schemas_type_arrives_as_it_was_written(value: Any) -> None:
    names = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    text = value if isinstance(value, str) else json.dumps(value)
    schema = {"type": names[type(value)]}
    assert typed_arguments({"a": text}, "add", [taking(a=schema)]) == {"a": value}


GOOD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
DEEP = "[" * 400 + "]" * 400
DEEPEST = "[" * 980 + "]" * 980


@pytest.mark.parametrize(
    "text",
    [
        "[a" + ".b" * 9000 + "(x=1)]",
        "[f" + "()" * 700 + "(x=1)]",
        "[f()(" + "lambda:" * 90 + "1)(x=1)]",
        "[f(x=" + "-" * 9000 + "1)]",
        "[f(x=" + "1+" * 4000 + "1)]",
        "[f(x=" + "(" * 9000 + ")]",
        f"[f(x={'9' * 5000})]",
        "[f(x='\ud800')]",
        f"[TOOL_CALLS][{DEEPEST}]",
        f'[TOOL_CALLS]add{{"a": {DEEP}}}',
        f'{{"name": "add", "arguments": {{"a": {DEEP}}}}}',
        f'<|python_tag|>{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}',
        f"<tool_call>{DEEPEST}</tool_call>",
        "<tool_call>" + "[" * 100_000,
        "[TOOL_CALLS]" + "[" * 10**5,
        "[f(a=" + "[" * 15_000 + "]" * 15_000 + ")]",
        f'<tool_call>{{"name": {DEEPEST}, "arguments": {{}}}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": "{"}</tool_call>',
        f"<function=add><parameter=b>{DEEP}</parameter></function>",
    ],
)
def test_the_problem_of_a_malformed_call_can_be_written(text: str) -> None:
    [call] = tool_calls_of(said(text), TOOLS)
    if isinstance(call, MalformedCall):
        assert f"{call.name}{call.problem}".encode()
        assert len(call.problem) < 20_000
    else:
        assert (call.name[:4], call.arguments) == ("a.b.", {"x": 1}), "a name that no tool has"


def test_calls_beside_a_malformed_one_are_read() -> None:
    good = ToolCall("add", {"a": 1})
    for middle in (DEEPEST, DEEP, "{", '{"name": "\\ud800"}', f'{{"name": "f", "arguments": {{"a": {DEEP}}}}}'):
        first, malformed, last = tool_calls_of(said(f"{GOOD}<tool_call>{middle}</tool_call>{GOOD}"))
        assert (first, type(malformed), last) == (good, MalformedCall, good)


@pytest.mark.parametrize("text", ["<|python_tag|>" + "1;" * 5000, GOOD * 5000, f"[{','.join(['add(a=1)'] * 2000)}]"])
def test_calls_behind_the_first_thousand_are_one_malformed_call(text: str) -> None:
    calls = tool_calls_of(said(text))
    assert len(calls) == 1025
    assert calls[-1] == MalformedCall("A response makes at most 1024 calls. Those behind them were not read.")
    assert tool_calls_of(said(GOOD * 1024)) == [ToolCall("add", {"a": 1})] * 1024


@pytest.mark.parametrize("failure", [RecursionError("too deep"), MemoryError(), OverflowError("too large")])
def test_whatever_reading_raises_is_a_malformed_call_with_its_id(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> ToolCall:
        raise failure

    monkeypatch.setattr("rollout_env.tool_calls.checked_call", fail)
    records = [{"id": "call00000", "function": {"name": "add", "arguments": "{}"}}]
    problem = f"The call could not be read: {type(failure).__name__}: {failure}"
    assert tool_calls_of(said("", tool_calls=records)) == [MalformedCall(problem, None, "call00000")]
    assert tool_calls_of(said("[add(a=1)]")) == [MalformedCall(problem)]


@pytest.mark.parametrize(("levels", "is_read"), [(99, True), (100, False)])
def test_arguments_have_at_most_a_hundred_levels(levels: int, is_read: bool) -> None:
    nested = json.loads("[" * levels + "]" * levels)
    [call] = tool_calls_of(said(call_of("add", {"a": nested})))
    malformed = MalformedCall("The arguments of add are nested deeper than 100 levels.", "add")
    assert call == (ToolCall("add", {"a": nested}) if is_read else malformed)
