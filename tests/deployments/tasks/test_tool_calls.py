"""Questions for which tools are called, and single calls that must be the expected ones."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deployments.tasks.tool_calls import (
    _LONGEST_EXPRESSION,
    LONGEST_RESULT,
    TOO_MANY,
    Tool,
    ToolCallsEnvironment,
    ToolSet,
    _ToolCallsInfo,
    _ToolSettings,
    calculate,
)
from rollout_env import ChatMessage, ToolCall, check, play

SUM = {"messages": [{"role": "user", "content": "What is 17 * 24?"}], "extra_env_info": {"ground_truth": 408}}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "17 * 24"}}</tool_call>'
BOOK = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {"room": {"type": "string"}, "hours": {"type": "integer"}},
            "required": ["room"],
            "additionalProperties": False,
        },
    },
}


def booking(*expected: dict[str, Any], **info: Any) -> dict[str, Any]:
    calls = [{"name": "book", "arguments": arguments} for arguments in expected]
    return {
        "messages": [{"role": "user", "content": "Book."}],
        "extra_env_info": {"tools": [BOOK], "expected_calls": calls, **info},
    }


def book(arguments: str) -> str:
    return f'<tool_call>{{"name": "book", "arguments": {arguments}}}</tool_call>'


def contents(message_log: list[ChatMessage]) -> list[str]:
    return [message["content"] for message in message_log]


def test_a_call_is_computed_and_the_answer_after_it_judged() -> None:
    played = play(ToolCallsEnvironment(), [CALL, "\\boxed{408}"], SUM)
    assert contents(played.message_log[2:]) == ["408", "\\boxed{408}", "Environment: correct."]
    assert played.message_log[2]["role"] == "tool"
    assert (played.rewards, played.terminated, played.answers[-1]) == ({"correct": 1.0}, True, "408")
    no_truth = {**SUM, "extra_env_info": {"ground_truth": ""}}
    assert play(ToolCallsEnvironment(), ["\\boxed{}"], no_truth).total_reward == 0.0, "an empty answer is never right"
    assert played.metrics == {"calls": 1, "malformed_calls": 0}


def test_calls_that_the_service_has_parsed_are_answered_with_their_ids() -> None:
    calls = [
        {"id": f"call0000{place}", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
        for place, arguments in enumerate(['{"expression": "1 + 1"}', '{"expression": 1}'])
    ]
    reply: ChatMessage = {"role": "assistant", "content": "(markup)", "tool_calls": calls}
    played = play(ToolCallsEnvironment(), [reply, "2"], {**SUM, "extra_env_info": {"ground_truth": "2"}})
    right, wrong = played.message_log[2:4]
    assert right == {"role": "tool", "content": "2", "tool_call_id": "call00000", "name": "calculator"}
    assert wrong == {
        "role": "tool",
        "content": 'Error: The call of calculator is not valid: arguments.expression: 1 is not of type "string".',
        "tool_call_id": "call00001",
        "name": "calculator",
    }
    assert played.metrics == {"calls": 2, "malformed_calls": 1}
    assert played.rewards == {"correct": 1.0}


def test_malformed_calls_are_answered_and_cost_what_the_config_says() -> None:
    """What a tool raises is answered too, and is no malformed call."""
    raising = '{"name": "calculator", "arguments": {"expression": "1 / 0"}}'
    replies = ["<tool_call>{</tool_call>", '{"name": "search", "arguments": {}}', raising, "408"]
    played = play(ToolCallsEnvironment(malformed_reward=-0.5), replies, SUM)
    assert played.message_log[2]["content"].startswith("Error: The call is not valid JSON")
    assert played.message_log[4]["content"] == "Error: There is no tool search. The tools are: calculator."
    assert played.rewards == {"correct": 1.0, "malformed": -1.0}
    assert played.message_log[6]["content"] == "Error: division by zero"
    assert played.metrics == {"calls": 3, "malformed_calls": 2}


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ("[a" + ".b" * 700 + "(x=1)]", "Error: There is no tool a.b.b.b."),
        ("[f" + "()" * 700 + "(x=1)]", "Error: Each element of the list must be a call, such as add(a=1)."),
        (book('{"room": ' + "[" * 200 + "]" * 200 + "}"), "Error: The arguments of book are nested deeper than 100"),
        (book('{"room": ' + "9" * 4000 + "}"), "Error: The call of book is not valid: arguments.room: 9999"),
        (book('{"room": "a", "\\ud800": 1}'), "Error: The arguments of book have a value that JSON does not have."),
    ],
)
def test_a_malformed_call_is_answered_whatever_it_is_made_of(reply: str, told: str) -> None:
    played = play(ToolCallsEnvironment(), [reply], booking({"room": "a"}))
    assert contents(played.message_log[2:])[0].startswith(told)
    assert (played.total_reward, played.terminated) == (0.0, True)
    assert played.metrics == {"calls": 1, "malformed_calls": 1}


def test_more_calls_than_are_permitted_end_the_rollout_without_being_made() -> None:
    played = play(ToolCallsEnvironment(most_calls=2), [CALL, CALL + CALL, "408"], SUM)
    assert (played.message_log[-1]["content"], played.total_reward, played.unused_replies) == (TOO_MANY, 0.0, ["408"])


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        (book('{"room": "A", "hours": 2}') + book('{"room": "B"}'), 1.0),
        (book('{"room": "B"}') + book('{"hours": 2.0, "room": "A"}'), 1.0),
        (book('{"room": "A", "hours": 2}'), 0.0),
        (book('{"room": "A", "hours": 2}') * 2, 0.0),
        (book('{"room": "A", "hours": 2}') + book('{"room": "B"}') + "<tool_call>", 0.0),
        (book('{"room": "A", "hours": 2}') + book('{"room": "B", "floor": 1}'), 0.0),
        ("I booked both.", 0.0),
    ],
)
def test_without_a_right_answer_the_calls_must_be_the_expected_ones(reply: str, reward: float) -> None:
    played = play(ToolCallsEnvironment(), [reply], booking({"room": "A", "hours": 2}, {"room": "B"}))
    assert (played.rewards, played.terminated) == ({"correct": reward}, True)


def test_expected_calls_are_answered_with_their_results_and_all_are_needed() -> None:
    expected = [{"name": "book", "arguments": {"room": room}, "result": f"{room} is yours"} for room in "AB"]
    sample = booking(ground_truth="done", expected_calls=expected)
    replies = [book('{"room": "B"}'), book('{"room": "C"}') + book('{"room": "A"}'), "done"]
    played = play(ToolCallsEnvironment(), replies, sample)
    assert contents(played.message_log)[2:6:2] == ["B is yours", "Error: no result is known for these arguments."]
    assert played.message_log[5]["content"] == "A is yours"
    assert played.total_reward == 1.0
    assert play(ToolCallsEnvironment(), [replies[0], "done"], sample).total_reward == 0.0


def test_a_tool_of_the_config_goes_before_a_samples_of_the_same_name() -> None:
    sample = {**SUM, "extra_env_info": {"ground_truth": 408, "tools": [{"name": "calculator"}, BOOK]}}
    played = play(ToolCallsEnvironment(), [CALL + book('{"room": "A"}'), "408"], sample)
    assert contents(played.message_log)[2:4] == ["408", "Error: no result is known for these arguments."]
    assert played.total_reward == 1.0


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"ground_truth": "1", "tools": [{"type": "function", "function": {"parameters": {}}}]},
        {"ground_truth": "1", "tools": [{"function": {"name": "f", "parameters": {"type": "objet"}}}]},
        {"ground_truth": "1", "tools": [BOOK, BOOK]},
    ],
)
def test_a_sample_without_an_aim_or_with_tools_that_are_none_is_refused(info: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        _ToolCallsInfo.model_validate(info)


def test_tools_of_the_config_are_functions_by_import_path() -> None:
    settings = _ToolSettings(name="capitals", function="string:capwords", parameters={"required": ["s"]})
    environment = ToolCallsEnvironment(tools=[settings])
    [schema] = environment.tools
    assert schema["function"]["name"] == "capitals"
    played = play(environment, ['{"name": "capitals", "arguments": {"s": "ab cd"}}', "x"], SUM)
    assert played.message_log[2]["content"] == "Ab Cd"
    with pytest.raises(ValueError, match="name of its own"):
        ToolCallsEnvironment(tools=[settings, settings])


def test_a_result_that_is_no_text_is_json_and_a_long_one_is_cut() -> None:
    tools = ToolSet([Tool({"name": "f"}, lambda n: ["x"] * n)])
    assert tools.answer(ToolCall("f", {"n": 2}))["content"] == '["x", "x"]'
    assert len(tools.answer(ToolCall("f", {"n": 10_000}))["content"]) == LONGEST_RESULT + len("\n[...]")
    unwritable = ToolSet([Tool({"name": "f"}, lambda: {1})])
    assert unwritable.answer(ToolCall("f", {}))["content"] == "Error: Object of type set is not JSON serializable"


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 * (3 + 4)", "14"), ("-7 // 2", "-4"), ("1 / 4", "0.25"), ("6 / 3", "2"), (" 7 % 4 ", "3"), ("+1.5", "1.5")],
)
def test_the_calculator_knows_arithmetic(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "x", "2 ** 3", "__import__('os')", "10" * _LONGEST_EXPRESSION, "True", "1e308 * 10", "(" * 150, "1j"],
)
def test_the_calculator_refuses_everything_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"arithmetic|longer|large|only numbers"):
        calculate(expression)


@given(st.text(alphabet="0123456789+-*/%(). e_jx", max_size=40))
def test_no_expression_raises_anything_but_what_is_answered(expression: str) -> None:
    try:
        float(calculate(expression))
    except (ValueError, ZeroDivisionError):
        return


def test_it_keeps_the_rules_for_environments() -> None:
    check(ToolCallsEnvironment, replies=[CALL, "<tool_call>{", "408"])
