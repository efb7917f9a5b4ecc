"""The chat format of `models/small`: tools, their results and thoughts over turns, token by token."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import AutoTokenizer

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.protocols.chat import ChatOptions
from models.recipes import NO_LOSS
from models.small.recipe.chat_format import (
    MARKERS,
    SPECIAL_TOKENS,
    conversation_of,
    make_tokenizer,
    rendered_ids,
)
from rollout_client.contract.messages import PromptMessage
from rollout_env import ChatMessage
from tests.paths import SMALL_MODEL

saved: Any = AutoTokenizer.from_pretrained(SMALL_MODEL)
tokenizer = make_tokenizer()
tokens = TransformersChatTokenizer(saved)
END = saved.convert_tokens_to_ids("<|im_end|>")
ROOM = 16384
CALCULATOR = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
SCHEMA = '{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}'
SUM = {"type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1 + 2"}'}}
SUM_TEXT = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call>'
words = st.text(alphabet="ab é漢{<\n", max_size=8)


def text_of(ids: list[int]) -> str:
    return str(saved.decode(ids, skip_special_tokens=False))


def rendering(messages: list[dict[str, Any]], **options: Any) -> str:
    return str(saved.apply_chat_template(messages, tokenize=False, **options))


def test_the_saved_tokenizer_is_the_one_that_the_recipe_makes() -> None:
    assert saved.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert saved.chat_template == tokenizer.chat_template
    assert (saved.eos_token, saved.pad_token, saved.model_max_length) == ("<|im_end|>", "<|endoftext|>", 16384)


# Hypothesis also draws strings that the code under test contains, and so the markers.
@given(st.text().filter(lambda text: not any(marker in text for marker in SPECIAL_TOKENS + MARKERS)))
def test_any_text_without_markers_is_its_bytes_and_comes_back(text: str) -> None:
    ids = saved(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode())
    assert saved.decode(ids) == text


@given(st.lists(st.one_of(st.sampled_from(SPECIAL_TOKENS + MARKERS), words), max_size=8).map("".join))
def test_text_with_markers_comes_back(text: str) -> None:
    assert text_of(saved(text, add_special_tokens=False)["input_ids"]) == text


def test_decoding_skips_the_end_of_a_turn_and_keeps_markers() -> None:
    ids = saved(f"<think>1+2</think>{SUM_TEXT}<|im_end|>", add_special_tokens=False)["input_ids"]
    assert tokens.decode(ids) == f"<think>1+2</think>{SUM_TEXT}"


def test_a_conversation_with_tools_is_rendered_in_the_tags_of_hermes() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": None, "reasoning_content": "add", "tool_calls": [SUM, SUM]},
        {"role": "tool", "content": "3", "tool_call_id": "a", "name": "calculator"},
        {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "b"},
    ]
    assert rendering(messages, tools=[CALCULATOR], add_generation_prompt=True) == (
        f"<|im_start|>system\nBe brief.\n<tools>\n{SCHEMA}\n</tools><|im_end|>\n"
        "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n"
        f"<|im_start|>assistant\n<think>add</think>{SUM_TEXT}\n{SUM_TEXT}<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>tool\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_arguments_may_be_an_object_or_its_json() -> None:
    spoken = {"name": "calculator", "arguments": {"expression": "1 + 2"}}
    calls: list[Any] = [SUM, {"function": spoken}, spoken]
    renderings = {rendering([{"role": "assistant", "content": "", "tool_calls": [one]}]) for one in calls}
    assert renderings == {f"<|im_start|>assistant\n{SUM_TEXT}<|im_end|>\n"}


def test_without_thinking_every_reply_begins_with_an_empty_thought() -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    framed = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think></think>"
    assert rendering(messages, enable_thinking=False) == f"{framed}A<|im_end|>\n"
    assert rendering(messages[:1], enable_thinking=False, add_generation_prompt=True) == framed


def test_an_unknown_role_is_refused_and_an_environment_speaks_as_the_user() -> None:
    with pytest.raises(TemplateError, match="Unknown role: judge"):
        rendering([{"role": "judge", "content": "Q"}])
    assert rendering([{"role": "environment", "content": "Q"}]) == "<|im_start|>user\nQ<|im_end|>\n"


replies = st.builds(
    lambda thought, said, call: (f"<think>{thought}</think>" if thought else "") + said + (SUM_TEXT if call else ""),
    st.text(alphabet="ab é", max_size=5),
    words,
    st.booleans(),
)
results = st.lists(st.tuples(st.sampled_from(["tool", "user"]), words), min_size=1, max_size=3)


@given(
    question=words,
    turns=st.lists(st.tuples(replies, results), min_size=1, max_size=3),
    tools=st.sampled_from([None, [CALCULATOR], [CALCULATOR, CALCULATOR]]),
    thinks=st.booleans(),
    system=st.booleans(),
)
def test_ids_appended_turn_by_turn_are_those_of_the_whole_conversation(
    question: str, turns: list[Any], tools: list[dict[str, Any]] | None, thinks: bool, system: bool
) -> None:
    kwargs = {} if thinks else {"enable_thinking": False}
    options = ChatOptions(tools=tools, chat_template_kwargs=kwargs)
    chat: list[Any] = [*([{"role": "system", "content": "S"}] if system else []), {"role": "user", "content": question}]
    prompt = tokens.prompt([PromptMessage.model_validate(message) for message in chat], options, ROOM)
    log = [token_id for message in prompt for token_id in message.token_ids]
    for said, answers in turns:
        response = [*saved(said, add_special_tokens=False)["input_ids"], END]
        observation: list[ChatMessage] = [{"role": role, "content": content} for role, content in answers]
        observed = tokens.observations(observation, response, options, ROOM)
        log += response + [token_id for message in observed for token_id in message.token_ids]
        chat += [{"role": "assistant", "content": said}, *({**message} for message in observation)]
        whole = rendering(chat, tools=tools, add_generation_prompt=True, **kwargs)
        assert log == saved(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("thinks", [True, False])
def test_more_messages_only_append_to_a_rendering(thinks: bool) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "reasoning_content": "add" if thinks else None, "tool_calls": [SUM]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "A", "reasoning_content": "so" if thinks else None},
        {"role": "user", "content": "Q"},
    ]
    texts = [
        text_of(rendered_ids(tokenizer, messages[:count], [CALCULATOR], thinks))
        for count in range(1, len(messages) + 1)
    ]
    assert all(after.startswith(before) for before, after in pairwise(texts))


@pytest.mark.parametrize("thinks", [True, False])
def test_learnt_are_the_replies_and_their_ends_alone(thinks: bool) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "assistant\n"},
        {"role": "assistant", "content": "", "reasoning_content": "add" if thinks else None, "tool_calls": [SUM]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "A"},
    ]
    conversation = conversation_of(tokenizer, messages, [CALCULATOR], thinks)
    learnt = [label for label in conversation.labels if label != NO_LOSS]
    thought = "<think>add</think>" if thinks else ""
    assert text_of(learnt) == f"{thought}{SUM_TEXT}<|im_end|>A<|im_end|>"
    pairs = zip(conversation.token_ids, conversation.labels, strict=True)
    assert all(label in (NO_LOSS, token_id) for token_id, label in pairs)


@pytest.mark.parametrize(("thinks", "learnt"), [(True, "<think></think>A<|im_end|>"), (False, "A<|im_end|>")])
def test_an_empty_thought_is_learnt_only_where_the_template_does_not_begin_with_it(thinks: bool, learnt: str) -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "reasoning_content": ""}]
    labels = conversation_of(tokenizer, messages, [], thinks).labels
    assert text_of([label for label in labels if label != NO_LOSS]) == learnt


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("reasoning", "content"), [("add", ""), (" add\n", "So: "), ("", "")])
def test_what_vllms_parsers_read_in_a_reply_is_rendered_as_the_same_ids(reasoning: str, content: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    response = saved(f"<think>{reasoning}</think>{content}{SUM_TEXT}\n{SUM_TEXT}", add_special_tokens=False)[
        "input_ids"
    ]
    asked = {"messages": [{"role": "user", "content": "Q"}], "tools": [CALCULATOR]}
    request: Any = ChatCompletionRequest.model_validate(asked)
    thoughts = ReasoningParserManager.get_reasoning_parser("deepseek_r1")(saved)
    thought, said = thoughts.extract_reasoning(tokens.decode([*response, END]), request)
    called = ToolParserManager.get_tool_parser("hermes")(saved, request.tools).extract_tool_calls(said or "", request)
    calls = [one.model_dump() for one in called.tool_calls]
    read = {"role": "assistant", "content": called.content, "reasoning_content": thought, "tool_calls": calls}
    assert (thought, called.content or "") == (reasoning, content)
    assert (
        rendered_ids(tokenizer, [read], [], True)
        == saved(f"<|im_start|>assistant\n{tokens.decode(response)}<|im_end|>\n", add_special_tokens=False)["input_ids"]
    )
