"""Streams of vLLM's servers that differ from what OpenAI's API says, with and without the patches."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm.parser.abstract_parser import DelegatingParser
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

from deployments.generation.serving import answered_layers
from deployments.upstream.vllm.streamed_parsing import install
from tests.deployments.generation.serving.vllm_layers import Served
from tests.paths import SMALL_MODEL
from tests.virtual_time import runs

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
THOUGHT = "<think>2+3=5</think>The answer is 5."
QUESTION = {"role": "user", "content": "2 + 3?"}
BY_ITSELF = "vLLM does it by itself: drop the patch"
install()


def without(patched: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's own."""
    own: Callable[..., Any] = patched.__wrapped__  # type: ignore[attr-defined]
    return own


def reasoning_and_content(extract: Callable[..., Any], size: int) -> tuple[str, str]:
    """Of `THOUGHT` in events of so many tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(SMALL_MODEL)
    parser = DeepSeekR1ReasoningParser(tokenizer)
    ids = tokenizer.encode(THOUGHT, add_special_tokens=False)
    reasoning, content = "", ""
    for begin in range(0, len(ids), size):
        before, until = ids[:begin], ids[: begin + size]
        previous, current, delta = (tokenizer.decode(some) for some in (before, until, until[begin:]))
        message = extract(parser, previous, current, delta, before, until, until[begin:])
        if message is not None:
            reasoning += message.reasoning or ""
            content += message.content or ""
    return reasoning, content


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9, 100])
def test_the_reasoning_of_a_stream_has_no_start_of_a_thought(size: int) -> None:
    install()
    expected = ("2+3=5", "The answer is 5.")
    assert reasoning_and_content(DeepSeekR1ReasoningParser.extract_reasoning_streaming, size) == expected


def test_the_start_of_a_thought_must_still_be_left_out() -> None:
    own = without(BaseThinkingReasoningParser.extract_reasoning_streaming)

    def extract(parser: Any, *given: Any) -> Any:
        parser.extract_reasoning_streaming = None
        return DeepSeekR1ReasoningParser.extract_reasoning_streaming(parser, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseThinkingReasoningParser, "extract_reasoning_streaming", own)
        assert reasoning_and_content(extract, 3)[0].startswith("<think>"), BY_ITSELF


async def streamed(served: Served, text: str, stop: list[str], step: int) -> tuple[str, str]:
    """The reasoning and the content of a chat's events."""
    served.core.step = step
    served.reply(text)
    events = await served.events("chat/completions", {"messages": [QUESTION], "stop": stop})
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    reasoning, content = ("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content"))
    return reasoning, content


async def whole(served: Served, text: str, stop: list[str]) -> tuple[str, str]:
    served.core.step = 1
    served.reply(text)
    _, answer = await served.answer("chat/completions", {"messages": [QUESTION], "stop": stop})
    message = answer["choices"][0]["message"]
    return message["reasoning"] or "", message["content"] or ""


@pytest.fixture(scope="module")
def thinking() -> Served:
    return Served(reasoning_parser="deepseek_r1")


pieces = st.sampled_from(
    ["<", "<think>", "</think>", "/think", "think>", "</th", "5", " is", "é", "🙂", "</answer>", "nk"]
)
texts = st.lists(pieces, max_size=6).map("".join)


@pytest.mark.parametrize(
    "stop", [["</answer>"], ["zzzzz", "5"], ["."], ["</think>"], ["hink>"], ["STOPSTOPSTOPSTOPSTOP"]]
)
@pytest.mark.parametrize("step", [1, 3, 100])
@runs
async def test_a_stream_with_stop_strings_is_what_is_answered_at_once(
    thinking: Served, stop: list[str], step: int
) -> None:
    assert await streamed(thinking, THOUGHT, stop, step) == await whole(thinking, THOUGHT, stop)


@given(thought=texts, answer=texts, stop=st.lists(pieces, min_size=1, max_size=2), step=st.integers(1, 5))
def test_whatever_is_thought_and_said_a_stream_with_stop_strings_is_what_is_answered_at_once(
    thinking: Served, thought: str, answer: str, stop: list[str], step: int
) -> None:
    @runs
    async def compare() -> None:
        text = f"<think>{thought}</think>{answer}"
        assert await streamed(thinking, text, stop, step) == await whole(thinking, text, stop)

    compare()


@runs
async def test_tokens_must_still_wait_for_their_text() -> None:
    with pytest.MonkeyPatch.context() as patch:
        served = Served(reasoning_parser="deepseek_r1")
        patch.setattr(DelegatingParser, "parse_delta", without(DelegatingParser.parse_delta))
        _, content = await streamed(served, THOUGHT, ["</answer>"], 3)
    assert content != "The answer is 5.", BY_ITSELF


@pytest.mark.parametrize("session", [None, "s"])
@pytest.mark.parametrize("ends", [False, True])
@runs
async def test_a_response_that_was_cut_is_incomplete_streamed_or_not(ends: bool, session: str | None) -> None:
    served = await Served(reasoning_parser="deepseek_r1").open()
    status, reason = ("completed", None) if ends else ("incomplete", {"reason": "max_output_tokens"})
    served.reply(THOUGHT, ends)
    _, answer = await served.answer("responses", {"input": "2 + 3?"}, session)
    assert (answer["status"], answer["incomplete_details"]) == (status, reason)
    served.reply(THOUGHT, ends)
    events = await served.events("responses", {"input": "2 + 3?"}, session)
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"], response["incomplete_details"]) == (
        f"response.{status}",
        status,
        reason,
    )
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    samples = await served.samples()
    assert [sample.truncated for sample in samples] == ([] if session is None else [not ends] * 2)


@runs
async def test_the_last_event_of_a_cut_response_must_still_be_named() -> None:
    served = Served()
    served.reply("5", ends=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answered_layers, "ending_as_they_end", lambda events: events)
        events = await served.events("responses", {"input": "2 + 3?"})
    assert events[-1]["type"] == "response.completed", BY_ITSELF


def test_patches_that_are_installed_twice_are_installed_once() -> None:
    parse_delta = DelegatingParser.parse_delta
    install()
    assert DelegatingParser.parse_delta is parse_delta
