"""A session's prompt through a vendor's template: results of tools are rendered as answers to the calls before them."""

from typing import Any

import pytest

from deployments.failures import EnvironmentRejected, PromptRejected
from deployments.generation.serving.template_renderer import TemplateRenderer
from deployments.protocols.generation import packed_ids, packed_logprobs
from deployments.sessions.records import ChatContext, EngineCall, GeneratedMessage, prepared_prompt
from deployments.sessions.session_record import SessionRecord
from tests.deployments.chat.vendors import Vendor, vendor

PLAIN = ChatContext()
QUESTION = {"role": "user", "content": "Question"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 41}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "call00000"}


def second_prompt(one: Vendor, response: str, messages: list[Any]) -> str:
    """The prompt of a call with these messages, after a first call for the question alone."""
    renderer, record = TemplateRenderer(one.tokens, 10_000), SessionRecord()
    plan = record.plan([QUESTION], PLAIN)
    first = prepared_prompt(plan, [QUESTION], PLAIN, renderer)
    ids = packed_ids(one.ids_of(response))
    made = GeneratedMessage("made", CALLING, response, ids, packed_logprobs([0.0] * len(ids)), "stop")
    record.add(EngineCall("call", PLAIN, plan, first.rendered, first.generation_prompt, [made]))
    return one.text_of([*prepared_prompt(record.plan(messages, PLAIN), messages, PLAIN, renderer).token_ids])


def test_a_result_follows_the_ids_of_its_call_as_the_template_writes_it() -> None:
    one = vendor("gptoss")
    response = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 41}<|call|>'
    after = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"42"<|end|><|start|>assistant'
    assert second_prompt(one, response, [QUESTION, CALLING, RESULT]) == one.rendered([QUESTION]) + response + after


def test_a_result_that_the_template_drops_is_refused() -> None:
    with pytest.raises(EnvironmentRejected, match="drops messages of role 'tool' after an answer"):
        second_prompt(vendor("phi3"), "calls<|end|>", [QUESTION, CALLING, RESULT])


def test_a_session_may_begin_with_a_system_prompt_that_is_no_prompt_alone() -> None:
    one = vendor("qwen3_5_think")
    messages = [{"role": "system", "content": "Be brief."}, QUESTION]
    renderer = TemplateRenderer(one.tokens, 10_000)
    prompt = prepared_prompt(SessionRecord().plan(messages, PLAIN), messages, PLAIN, renderer)
    assert one.text_of([*prompt.token_ids]) == one.rendered(messages)
    assert [one.text_of([*each.token_ids]) for each in prompt.rendered] == [
        "<|im_start|>system\nBe brief.<|im_end|>\n",
        "<|im_start|>user\nQuestion<|im_end|>\n",
    ]
    with pytest.raises(PromptRejected, match="No user query found"):
        renderer.prompt(messages[:1], PLAIN)
