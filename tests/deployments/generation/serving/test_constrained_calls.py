"""Calls of a session under a grammar: none that nobody asked for, and the record says which were asked for."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter
from vllm.sampling_params import SamplingParams

from deployments.protocols.generation import packed_ids, packed_logprobs
from deployments.protocols.model_server import Endpoint
from deployments.sessions.codec import call_entry, call_of
from deployments.sessions.records import NO_PLAN, ChatContext, EngineCall, GeneratedMessage
from rollout_client.contract.messages import GivenMessage, SampledWith, may_be_trained
from tests.deployments.generation.serving.vllm_layers import Served

# Importing vLLM takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]
QUESTION = {"role": "user", "content": "2 + 3?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ADD = {"name": "add", "parameters": SCHEMA}
PARSERS = ("hermes", "glm45", "qwen3_coder", "kimi_k2")
ENDPOINTS: list[Endpoint] = ["chat/completions", "responses", "messages", "generate", "inference/v1/generate"]
CHAT, OPENAI, CLAUDE, SGLANG, VLLM = ENDPOINTS


def body_of(endpoint: Endpoint, strict: bool = False, has_tools: bool = True, **fields: Any) -> dict[str, Any]:
    if endpoint in (SGLANG, VLLM):
        return {"input_ids" if endpoint == SGLANG else "token_ids": [72, 105], "sampling_params": fields}
    tool: Any = {**ADD, "strict": True} if strict else ADD
    if endpoint == OPENAI:
        body, tool = {"input": "2 + 3?", "max_output_tokens": 9}, {"type": "function", **tool}
    elif endpoint == CLAUDE:
        body = {"model": "small", "messages": [QUESTION], "max_tokens": 9}
        tool = {"name": "add", "input_schema": SCHEMA}
    else:
        body, tool = {"messages": [QUESTION], "max_tokens": 9}, {"type": "function", "function": tool}
    return {**body, **({"tools": [tool]} if has_tools else {}), **fields}


async def generated(served: Served, endpoint: Endpoint, body: dict[str, Any], session: str | None) -> SamplingParams:
    served.reply("5")
    await served.answered(endpoint, body, session)
    return served.core.params[-1]


@pytest.mark.parametrize("endpoint", [CHAT, OPENAI, CLAUDE])
@pytest.mark.parametrize("parser", PARSERS)
async def test_a_call_of_a_session_that_only_has_tools_samples_from_the_policy(parser: str, endpoint: Endpoint) -> None:
    served = await Served(tool_call_parser=parser).open()
    single = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    for fields in ({}, single if endpoint == CLAUDE else {"parallel_tool_calls": False}):
        assert (await generated(served, endpoint, body_of(endpoint, **fields), "s")).structured_outputs is None
    marks = [message.constrained for sample in await served.samples() for message in sample.message_log[1:]]
    assert marks == [None] * 2


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (CHAT, {"strict": True}),
        (CHAT, {"tool_choice": "required"}),
        (CHAT, {"response_format": {"type": "json_object"}, "has_tools": False}),
        (OPENAI, {"presence_penalty": 0.5}),
        (OPENAI, {"strict": True}),
        (CLAUDE, {"tool_choice": {"type": "any"}}),
        (SGLANG, {"min_new_tokens": 1}),
        (VLLM, {"allowed_token_ids": [53, 258]}),
    ],
)
async def test_the_record_says_which_messages_a_call_constrained(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    served = await Served(tool_call_parser="hermes").open()
    await generated(served, endpoint, body_of(endpoint, **fields), "s")
    [sample] = await served.samples()
    assert [message.constrained for message in sample.message_log] == [None, True]
    message = sample.message_log[-1].model_dump(exclude_unset=True)
    assert TypeAdapter(GivenMessage).validate_python(message).constrained


async def test_empty_switches_of_sglang_constrain_nothing() -> None:
    served = await Served().open()
    switches: dict[str, Any] = {"min_new_tokens": 0, "repetition_penalty": 1.0, "json_schema": None, "regex": ""}
    await generated(served, SGLANG, body_of(SGLANG, logit_bias={}, **switches), "s")
    [sample] = await served.samples()
    assert [message.constrained for message in sample.message_log] == [None, None]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_message_says_its_distribution_where_it_is_not_the_sessions(endpoint: Endpoint) -> None:
    served = await Served().open(sampling={"temperature": 0.7, "top_p": 0.9})
    for asked in ({}, {"temperature": 0.7}, {"temperature": 0}, {"temperature": 0.5}, {"top_k": 4}):
        await generated(served, endpoint, body_of(endpoint, has_tools=False, **asked), "s")
    log = [sample.message_log[-1] for sample in await served.samples()]
    assert [message.sampled_with for message in log] == [
        None,
        None,
        SampledWith(temperature=0.0),
        SampledWith(temperature=0.5, top_p=0.9),
        SampledWith(temperature=0.7, top_p=0.9, top_k=4),
    ]
    assert "sampled_with" not in log[0].model_dump(exclude_unset=True)
    assert [may_be_trained(message) for message in log] == [True, True, False, True, True]


def test_a_record_that_is_read_again_still_says_it() -> None:
    made = GeneratedMessage(
        "a", {"role": "assistant", "content": "5"}, "5", packed_ids([53]), packed_logprobs([-0.5]), "stop"
    )

    def entry(one: GeneratedMessage) -> bytes:
        return call_entry(EngineCall("a", ChatContext(), NO_PLAN, [], packed_ids(()), [one]))

    colder = SampledWith(temperature=0.5, top_k=4)
    for one in (made, replace(made, is_constrained=True), replace(made, sampled_with=colder)):
        assert call_of(entry(one)).generated == [one]
    before = json.loads(entry(made))
    del before["generated"][0]["is_constrained"]
    assert call_of(json.dumps(before).encode()).generated == [made]


async def test_a_call_without_a_session_is_constrained_as_in_vllms_own_server() -> None:
    params = await generated(Served(tool_call_parser="glm45"), CHAT, body_of(CHAT), None)
    assert params.structured_outputs is not None
    assert params.structured_outputs.structural_tag is not None
