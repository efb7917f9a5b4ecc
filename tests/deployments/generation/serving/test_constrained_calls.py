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
from rollout_client.contract.messages import GivenMessage, Message, SampledWith, may_be_trained
from tests.deployments.generation.serving.vllm_layers import Served
from tests.virtual_time import runs

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
QUESTION = {"role": "user", "content": "2 + 3?"}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD = {"name": "add", "parameters": PARAMETERS}
PARSERS = ("hermes", "glm45", "qwen3_coder", "kimi_k2")


def body_of(endpoint: Endpoint, strict: bool = False, **fields: Any) -> dict[str, Any]:
    tool = {**ADD, "strict": True} if strict else ADD
    if endpoint == "responses":
        return {"input": "2 + 3?", "tools": [{"type": "function", **tool}], "max_output_tokens": 9, **fields}
    if endpoint == "messages":
        tools = [{"name": "add", "input_schema": PARAMETERS}]
        return {"model": "small", "messages": [QUESTION], "tools": tools, "max_tokens": 9, **fields}
    return {"messages": [QUESTION], "tools": [{"type": "function", "function": tool}], "max_tokens": 9, **fields}


async def generated(served: Served, endpoint: Endpoint, body: dict[str, Any], session: str | None) -> SamplingParams:
    served.reply("5")
    before = len(served.core.params)
    status, answer = await served.answer(endpoint, body, session)
    assert status == 200, answer
    [params] = served.core.params[before:]
    return params


@pytest.mark.parametrize("endpoint", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("parser", PARSERS)
@runs
async def test_a_call_of_a_session_that_only_has_tools_samples_from_the_policy(parser: str, endpoint: Endpoint) -> None:
    served = await Served(tool_call_parser=parser).open()
    single = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    for fields in ({}, single if endpoint == "messages" else {"parallel_tool_calls": False}):
        params = await generated(served, endpoint, body_of(endpoint, **fields), "s")
        assert params.structured_outputs is None
    assert [message.constrained for sample in await served.samples() for message in sample.message_log[1:]] == [
        None
    ] * 2


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("chat/completions", {"strict": True}),
        ("chat/completions", {"tool_choice": "required"}),
        ("chat/completions", {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
        ("chat/completions", {"response_format": {"type": "json_object"}, "tools": None}),
        ("chat/completions", {"logit_bias": {"5": 1.0}}),
        ("chat/completions", {"allowed_token_ids": [53, 258]}),
        ("chat/completions", {"logit_bias": {"5": 0.0}}),
        ("chat/completions", {"bad_words": ["no"]}),
        ("chat/completions", {"presence_penalty": 0.5}),
        ("chat/completions", {"frequency_penalty": -0.5}),
        ("chat/completions", {"repetition_penalty": 1.1}),
        ("chat/completions", {"min_tokens": 1}),
        ("responses", {"presence_penalty": 0.5}),
        ("responses", {"repetition_penalty": 1.1}),
        ("responses", {"strict": True}),
        ("responses", {"tool_choice": "required"}),
        ("messages", {"tool_choice": {"type": "any"}}),
    ],
)
@runs
async def test_the_record_says_which_messages_were_generated_under_a_constraint_that_their_call_asked_for(
    endpoint: Endpoint, fields: dict[str, Any]
) -> None:
    served = await Served(tool_call_parser="hermes").open()
    await generated(served, endpoint, body_of(endpoint, **fields), "s")
    [sample] = await served.samples()
    assert [message.constrained for message in sample.message_log] == [None, True]
    message = sample.message_log[-1].model_dump(exclude_unset=True)
    assert TypeAdapter(GivenMessage).validate_python(message).constrained


PROMPT = [72, 105]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("generate", {"input_ids": PROMPT, "sampling_params": {"min_new_tokens": 1}}),
        ("generate", {"input_ids": PROMPT, "sampling_params": {"frequency_penalty": 0.5}}),
        ("inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"repetition_penalty": 1.1}}),
        ("inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"allowed_token_ids": [53, 258]}}),
    ],
)
@runs
async def test_calls_of_token_ids_say_it_too(endpoint: Endpoint, body: dict[str, Any]) -> None:
    served = await Served().open()
    await generated(served, endpoint, body, "s")
    [sample] = await served.samples()
    assert [message.constrained for message in sample.message_log] == [None, True]


@runs
async def test_empty_switches_of_sglang_constrain_nothing() -> None:
    served = await Served().open()
    asked = {"logit_bias": {}, "min_new_tokens": 0, "repetition_penalty": 1.0, "json_schema": None, "regex": ""}
    await generated(served, "generate", {"input_ids": PROMPT, "sampling_params": asked}, "s")
    [sample] = await served.samples()
    assert [message.constrained for message in sample.message_log] == [None, None]


CALLS: dict[Endpoint, dict[str, Any]] = {
    "chat/completions": {"messages": [QUESTION], "max_tokens": 9},
    "responses": {"input": "2 + 3?", "max_output_tokens": 9},
    "messages": {"model": "small", "messages": [QUESTION], "max_tokens": 9},
}


@pytest.mark.parametrize("endpoint", [*CALLS, "generate", "inference/v1/generate"])
@runs
async def test_a_message_says_its_own_distribution_where_it_is_not_that_of_the_session(endpoint: Endpoint) -> None:
    def body(**asked: Any) -> dict[str, Any]:
        if endpoint in CALLS:
            return {**CALLS[endpoint], **asked}
        return {"input_ids" if endpoint == "generate" else "token_ids": PROMPT, "sampling_params": asked}

    served = await Served().open(sampling={"temperature": 0.7, "top_p": 0.9})
    for asked in ({}, {"temperature": 0.7}, {"temperature": 0}, {"temperature": 0.5}, {"top_k": 4}):
        await generated(served, endpoint, body(**asked), "s")
    told = [sample.message_log[-1].sampled_with for sample in await served.samples()]
    assert told == [
        None,
        None,
        SampledWith(temperature=0.0),
        SampledWith(temperature=0.5, top_p=0.9),
        SampledWith(temperature=0.7, top_p=0.9, top_k=4),
    ]
    trained = [may_be_trained(sample.message_log[-1]) for sample in await served.samples()]
    assert trained == [True, True, False, True, True]


@runs
async def test_a_greedy_call_of_a_greedy_session_is_as_the_session_says() -> None:
    served = await Served().open(sampling={"greedy": True, "top_p": 0.9})
    await generated(served, "chat/completions", CALLS["chat/completions"], "s")
    [sample] = await served.samples()
    assert sample.message_log[-1].sampled_with is None
    assert "sampled_with" not in sample.message_log[-1].model_dump(exclude_unset=True)


def test_a_message_that_was_not_constrained_has_no_such_field() -> None:
    assert Message(role="user", content="", token_ids=[]).model_dump(exclude_unset=True).keys() == {
        "role",
        "content",
        "token_ids",
    }


def test_a_record_that_is_read_again_still_says_it_and_one_from_before_says_no() -> None:
    made = GeneratedMessage(
        "a", {"role": "assistant", "content": "5"}, "5", packed_ids([53]), packed_logprobs([-0.5]), "stop"
    )
    colder = SampledWith(temperature=0.5, top_k=4)
    for one in (made, replace(made, is_constrained=True), replace(made, sampled_with=colder)):
        assert call_of(call_entry(call_with(one))).generated == [one]
    before = json.loads(call_entry(call_with(made)))
    del before["generated"][0]["is_constrained"]
    assert call_of(json.dumps(before).encode()).generated == [made]


def call_with(made: GeneratedMessage) -> EngineCall:
    return EngineCall("a", ChatContext(), NO_PLAN, [], packed_ids(()), [made])


@runs
async def test_a_call_without_a_session_is_constrained_as_in_vllms_own_server() -> None:
    params = await generated(Served(tool_call_parser="glm45"), "chat/completions", body_of("chat/completions"), None)
    assert params.structured_outputs is not None
    assert params.structured_outputs.structural_tag is not None
