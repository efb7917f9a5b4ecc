"""The record of a session call by call: what continues what was generated, and what starts a branch."""

from dataclasses import replace
from typing import Any

import pytest

from deployments.failures import PromptRejected
from deployments.sessions.message_comparison import drift_report, rendered_key, response_key
from deployments.sessions.records import NO_PLAN, ChatContext, EngineCall, GenerationUnknown, TokenPrompt
from rollout_client.contract.sessions import MessageDrift
from tests.deployments.sessions.harness import NEXT, QUESTION, SYSTEM, FakeEngine, Reply
from tests.deployments.sessions.renderer import PLAIN, small
from tests.endurance.session_laws import forms

THOUGHTFUL = Reply("Let me see.", "add them", '{"b": 2, "a": 1}')
SPELLED = replace(THOUGHTFUL, is_spelled=True)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(small())


def assistant(content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}


ALL_FIELDS = ["content", "reasoning_content", "tool_calls"]
SENT_BACK = {
    "as it was": (lambda shown: shown, []),
    "reasoning in another field": (
        lambda shown: {**shown, "reasoning_content": None, "reasoning": shown["reasoning_content"]},
        [],
    ),
    "without reasoning": (forms.without_reasoning, ["reasoning_content"]),
    "arguments as an object": (forms.parsed, []),
    "arguments sorted and indented": (lambda shown: {**shown, "tool_calls": [call("x", '{\n "a": 1,\n "b": 2}')]}, []),
    "calls with other ids": (lambda shown: {**shown, "tool_calls": [call("x", '{"b": 2, "a": 1}')]}, []),
    "whitespace": (lambda shown: {**shown, "content": " Let  me see.\n"}, ["content"]),
    "one part": (forms.as_text_part, []),
    "the raw text": (lambda _: assistant(THOUGHTFUL.raw), ALL_FIELDS),
    "the raw text after the reasoning": (lambda _: assistant(THOUGHTFUL.raw.partition("</think>")[2]), ALL_FIELDS),
}


@pytest.mark.parametrize("reply", [THOUGHTFUL, SPELLED], ids=["canonical", "spelled"])
@pytest.mark.parametrize(("form", "fields"), SENT_BACK.values(), ids=SENT_BACK.keys())
def test_a_message_in_other_forms_keeps_its_ids(engine: FakeEngine, form: Any, fields: list[str], reply: Reply) -> None:
    made = engine.call([SYSTEM, QUESTION], reply)
    prepared = engine.prepare([SYSTEM, QUESTION, form(dict(made.message)), NEXT])
    bridge = engine.renderer.encode("\n<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n")
    assert list(prepared.prompt.token_ids) == [*engine.prompts[made.id], *made.token_ids, *bridge]
    drift = [(one.message, one.action, one.fields) for one in prepared.plan.drift]
    assert drift == ([(2, "generated_ids", fields)] if fields else [])


EDITS = {
    "another content": lambda shown: {**shown, "content": "Let me not see."},
    "another argument": lambda shown: {**shown, "tool_calls": [call("x", '{"a": 1, "b": 3}')]},
    "without its calls": lambda shown: {**shown, "tool_calls": None},
    "another reasoning": lambda shown: {**shown, "reasoning_content": "add"},
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_an_edited_response_starts_a_branch_after_the_one_before(engine: FakeEngine, edit: Any) -> None:
    first = engine.call([QUESTION], Reply("3"))
    second = engine.call([QUESTION, first.message, NEXT], THOUGHTFUL)
    prepared = engine.prepare([QUESTION, first.message, NEXT, edit(dict(second.message)), QUESTION])
    assert (prepared.plan.covered, prepared.plan.after is not None) == (2, True)
    assert [(one.message, one.action) for one in prepared.plan.drift] == [(3, "new_branch")]
    third = engine.finish(prepared, Reply("5"))[0]
    assert [node.generated.id for node in engine.record.branches() if node.generated] == [second.id, third.id]


def test_the_whitespace_of_a_message_that_was_not_generated_counts(engine: FakeEngine) -> None:
    engine.call([QUESTION], Reply("3"))
    plan = engine.record.plan([{**QUESTION, "content": "1 +  2?"}, NEXT], PLAIN)
    assert plan.drift == (MessageDrift(message=0, role="user", action="new_branch"),)


def test_a_retry_is_a_second_response_to_one_prompt_that_is_held_once(engine: FakeEngine) -> None:
    first, again = engine.call([SYSTEM], Reply("3")), engine.call([SYSTEM], Reply("4"))
    prompt = engine.prompts[first.id]
    assert engine.prompts[again.id] == prompt
    held = len(prompt) + len(first.token_ids) + len(again.token_ids)
    assert (engine.record.total_tokens, len(engine.record.branches())) == (held, 2)
    joined = engine.call([SYSTEM, QUESTION], Reply("3"))
    of_system = len(engine.renderer.prompt([SYSTEM, QUESTION], PLAIN)[0])
    assert engine.record.total_tokens == held + len(engine.prompts[joined.id]) - of_system + len(joined.token_ids)


def test_equal_parallel_responses_are_told_apart_by_ids_of_tool_calls(engine: FakeEngine) -> None:
    one, other = (engine.finish(each, THOUGHTFUL)[0] for each in [engine.prepare([QUESTION]) for _ in range(2)])
    for made in (one, other, one):
        result = {"role": "tool", "content": "3", "tool_call_id": made.message["tool_calls"][0]["id"]}
        assert engine.record.generated_at(engine.record.plan([QUESTION, made.message, result], PLAIN).after) is made


def test_of_equal_responses_the_longest_continued_one_goes_on(engine: FakeEngine) -> None:
    first = engine.call([QUESTION], Reply("3"))
    continued = engine.call([QUESTION, first.message, NEXT], Reply("6"))
    engine.call([QUESTION], Reply("3"))
    plan = engine.record.plan([QUESTION, first.message, NEXT, continued.message, NEXT], PLAIN)
    assert list(plan.token_ids) == [*engine.prompts[continued.id], *continued.token_ids]


def test_a_prompt_of_token_ids_continues_its_longest_generated_beginning(engine: FakeEngine) -> None:
    first = engine.call([QUESTION], Reply("3"))
    again = engine.call([QUESTION], Reply("3"))
    for made, covered in ((again, 2), (engine.call([QUESTION, first.message, NEXT], Reply("6")), 4)):
        ids = [*engine.prompts[made.id], *made.token_ids]
        for rest in ([1], []):
            plan = engine.record.plan(TokenPrompt([*ids, *rest]), PLAIN)
            assert (engine.record.generated_at(plan.after), plan.covered, [*plan.token_ids]) == (made, covered, ids)
        assert engine.record.plan(TokenPrompt(ids[:-1]), PLAIN).covered == covered - 2
    assert engine.record.plan(TokenPrompt([1, 2]), PLAIN) == NO_PLAN


def test_other_tools_or_a_missing_question_continue_no_response(engine: FakeEngine) -> None:
    made = engine.call([QUESTION], Reply("3"))
    tools = ChatContext(tools=[{"type": "function", "function": {"name": "add", "parameters": {}}}])
    assert engine.record.plan([QUESTION, made.message, NEXT], tools).after is None
    second = engine.call([QUESTION, made.message, NEXT], Reply("6"))
    assert engine.record.plan([QUESTION, made.message, NEXT, second.message], PLAIN).covered == 2


def test_a_call_is_recorded_once_and_without_tokens_not_at_all(engine: FakeEngine) -> None:
    prepared = engine.prepare([QUESTION])
    parts = prepared.context, prepared.plan, prepared.prompt.rendered, prepared.prompt.generation_prompt
    [made] = engine.finish(prepared, Reply("3"))
    held = engine.record.size_bytes, engine.record.total_tokens, dict(engine.record.calls)
    engine.record.add(EngineCall("call0", *parts, [replace(made, id="other")]))
    empty = replace(made, id="empty", token_ids=[], logprobs=[], finish_reason=None, weight_versions=())
    engine.record.add(EngineCall("call1", *parts, [empty]))
    assert (engine.record.size_bytes, engine.record.total_tokens, engine.record.calls) == held


def test_a_message_that_comes_back_otherwise_only_later_is_reported_once(engine: FakeEngine) -> None:
    first = engine.call([QUESTION], THOUGHTFUL)
    second = engine.call([QUESTION, first.message, NEXT], Reply("6"))
    sent = [QUESTION, forms.without_reasoning(dict(first.message)), NEXT, second.message, NEXT]
    third = engine.call(sent, Reply("9"))
    engine.call([*sent, third.message, NEXT], Reply("12"))
    report = drift_report("s", engine.record.calls.values())
    [call] = report.drift
    assert (report.calls, report.counts) == (4, {"generated_ids": 1, "new_branch": 0, "rendered_anew": 0})
    assert call.generation_ids == [third.id]
    assert [(one.message, one.fields) for one in call.messages] == [(1, ["reasoning_content"])]


def test_messages_that_are_nested_too_deeply_are_refused(engine: FakeEngine) -> None:
    nested: Any = "a"
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(PromptRejected, match="nested too deeply"):
        engine.record.plan([QUESTION], ChatContext(tools=[{"parameters": nested}]))


@pytest.mark.parametrize("arguments", ["no JSON", "[" * 100_000, "", '"\\ud800"', None])
def test_arguments_that_are_no_object_are_the_empty_one(engine: FakeEngine, arguments: Any) -> None:
    engine.call([QUESTION], THOUGHTFUL)
    edited = assistant("\ud800", tool_calls=[call("x", arguments), {}])
    assert [one.action for one in engine.record.plan([QUESTION, edited, NEXT], PLAIN).drift] == ["new_branch"]
    assert response_key(edited) == response_key(assistant(" \ud800", tool_calls=[call("y", {}), {}]))


def test_a_generated_call_of_bad_json_is_known_as_an_empty_object(engine: FakeEngine) -> None:
    made = engine.call([QUESTION], Reply("", None, '{"a": 1'))
    for content in list[Any]([None, "", []]):
        back = {**made.message, "content": content, "tool_calls": [call("x", {})]}
        plan = engine.record.plan([QUESTION, back, NEXT], PLAIN)
        assert (plan.covered, plan.drift) == (2, ())


def test_a_reward_for_what_was_not_generated_is_refused(engine: FakeEngine) -> None:
    with pytest.raises(GenerationUnknown, match="no message 'x'"):
        engine.record.reward({"reward": 1.0}, "x")


@pytest.mark.parametrize("nothing", [{}, {"content": None}, {"content": []}, {"content": "", "tool_calls": []}])
def test_a_message_without_content_or_calls_has_one_key(nothing: Any) -> None:
    assert rendered_key({"role": "assistant", **nothing}) == rendered_key({"role": "assistant", "content": ""})
