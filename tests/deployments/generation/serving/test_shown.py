"""What a caller has seen of an answer, from its events and from its items."""

import json
from types import SimpleNamespace
from typing import Any

from deployments.generation.serving.answered_layers import _shown_output
from deployments.generation.serving.session_call import _ShownChoices, shown_message


def event(*choices: dict[str, Any]) -> str:
    return f"data: {json.dumps({'choices': list(choices)})}\n\n"


def test_the_deltas_of_each_choice_are_joined() -> None:
    shown = _ShownChoices()
    shown.note(event({"index": 0, "delta": {"role": "assistant", "content": ""}}))
    shown.note(event({"index": 1, "delta": {"content": "B"}}, {"index": 0, "delta": {"reasoning": "why"}}))
    shown.note(event({"index": 0, "delta": {"content": "A"}}, {"index": 0, "delta": {"content": "a"}}))
    shown.note("data: [DONE]\n\n")
    assert shown.messages == {
        0: {"role": "assistant", "content": "Aa", "reasoning": "why"},
        1: {"role": "assistant", "content": "B"},
    }


def test_the_parts_of_tool_calls_are_joined() -> None:
    shown = _ShownChoices()
    first = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": ""}}
    second = {"index": 1, "id": "c2", "function": {"name": "sub", "arguments": "{}"}}
    shown.note(event({"index": 0, "delta": {"tool_calls": [first]}}))
    shown.note(event({"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}}))
    shown.note(event({"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}, second]}}))
    assert shown.messages[0]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
    ]
    assert shown.messages[0]["content"] is None


def test_events_without_choices_change_nothing() -> None:
    shown = _ShownChoices()
    shown.note(event())
    shown.note('data: {"error": {"message": "it broke"}}\n\n')
    assert shown.messages == {}


def test_a_message_keeps_the_fields_by_which_it_is_known_again() -> None:
    assert shown_message({"role": "assistant", "content": "A", "refusal": None, "tool_calls": []}) == {
        "role": "assistant",
        "content": "A",
    }


def test_the_items_of_a_response_are_one_message() -> None:
    part = SimpleNamespace
    items = [
        part(type="reasoning", content=[part(text="why")]),
        part(type="message", content=[part(text="A"), part(text="B")]),
        part(type="function_call", call_id="c1", name="add", arguments="{}"),
    ]
    assert _shown_output(items) == {
        "role": "assistant",
        "content": "AB",
        "reasoning": "why",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
    }
