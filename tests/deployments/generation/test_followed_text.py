"""Streams that are interrupted within characters and stop strings: as they would be without an interruption."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams

from deployments.generation.continued_completion import ContinuedCompletion
from deployments.upstream.vllm.token_texts import detokenizer_of
from tests.paths import SMALL_MODEL

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
tokenizer: Any = AutoTokenizer.from_pretrained(SMALL_MODEL)
SPECIAL = "<|im_start|>"
PROMPT: list[int] = tokenizer.encode("Say it: é", add_special_tokens=False)


class EngineRequest:
    """One request of the engine, which makes these tokens: its outputs are those of vLLM's front end."""

    def __init__(self, prompt: list[int], params: SamplingParams, token_ids: list[int], version: str) -> None:
        self._detokenizer = detokenizer_of(tokenizer, prompt, params)
        self._token_ids = token_ids
        self._version = version
        self._made = 0
        self.finish_reason: str | None = None

    def output(self, tokens: int, aborts: bool) -> RequestOutput:
        """The next of its tokens, at most so many, which come in one output."""
        given: list[int] = []
        stop = None
        while len(given) < tokens and stop is None and self._made < len(self._token_ids):
            given.append(self._token_ids[self._made])
            self._made += 1
            is_end = self._made == len(self._token_ids)
            stop = self._detokenizer.update(given[-1:], is_end)
            if stop is not None or is_end:
                self.finish_reason = "stop"
        if self.finish_reason is None and aborts:
            self.finish_reason = "abort"
        has_ended = self.finish_reason is not None
        text = self._detokenizer.get_next_output_text(has_ended, delta=True)
        spans = [WeightVersionSpan(self._version, 0, self._made)] if has_ended else None
        completion = CompletionOutput(
            0, text, given, None, None, finish_reason=self.finish_reason, stop_reason=stop, weight_versions=spans
        )
        return RequestOutput("id", None, [9], None, [completion], has_ended)


def streamed(token_ids: list[int], params: SamplingParams, steps: list[tuple[int, bool]]) -> tuple[Any, ...]:
    """What a caller gets in all. Args: `steps` are the outputs: their tokens, and whether an update aborts there."""
    completion = ContinuedCompletion(PROMPT, params, tokenizer)
    text, ids, ended = "", list[int](), None
    for version in range(len(steps) + 1):
        prompt, asked = completion.next_prompt(), completion.next_params()
        request = EngineRequest(prompt, asked, token_ids[len(prompt) - len(PROMPT) :], str(version))
        goes_on = False
        while request.finish_reason is None:
            tokens, is_updated = steps.pop(0) if steps else (1, False)
            output = completion.add(request.output(tokens, is_updated or completion.must_be_stopped), None)
            if output.outputs[0].finish_reason == "abort":
                goes_on = completion.interrupt(output)
            made = output.outputs[0]
            text, ids = text + made.text, ids + list(made.token_ids)
            assert params.include_stop_str_in_output or not any(stop in text for stop in params.stop or ())
        if not goes_on:
            ended = made
            break
    assert ended is not None
    spans = [(span.start, span.end) for span in ended.weight_versions or ()]
    assert [place for start, end in spans for place in range(start, end)] == list(range(len(ids)))
    return text, ids, ended.finish_reason, ended.stop_reason


@settings(max_examples=60)
@given(
    text=st.lists(st.sampled_from([*"ab \n中é😀", SPECIAL]), min_size=2, max_size=12).map("".join),
    stop=st.lists(
        st.sampled_from(
            ["ab", "a\n", "中a", "😀😀", "b b", SPECIAL, f"a{SPECIAL}", f"{SPECIAL}b", f"{SPECIAL}a{SPECIAL}"]
        ),
        max_size=2,
    ),
    shows_stop=st.booleans(),
    steps=st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=20),
)
def test_a_stream_is_the_same_wherever_it_is_interrupted(
    text: str, stop: list[str], shows_stop: bool, steps: list[tuple[int, bool]]
) -> None:
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    params = SamplingParams(
        max_tokens=100, stop=stop, include_stop_str_in_output=shows_stop, output_kind=RequestOutputKind.DELTA
    )
    # An update before anything was sent lets it begin anew: the first output is whole.
    assert streamed(token_ids, params, [(1, False), *steps]) == streamed(token_ids, params, [])


@pytest.mark.parametrize(("text", "stop"), [("x中y", []), ("xaby", ["ab"])], ids=["character", "stop string"])
def test_a_stream_that_is_interrupted_in_the_middle_goes_on(text: str, stop: list[str]) -> None:
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    params = SamplingParams(max_tokens=100, stop=stop, output_kind=RequestOutputKind.DELTA)
    completion = ContinuedCompletion(PROMPT, params, tokenizer)
    completion.next_prompt()
    request = EngineRequest(PROMPT, completion.next_params(), token_ids, "0")
    completion.add(request.output(1, aborts=False), None)
    open_ending = completion.add(request.output(1, aborts=True), None)
    assert completion.interrupt(open_ending)
    assert open_ending.outputs[0].finish_reason is None
    assert "\N{REPLACEMENT CHARACTER}" not in open_ending.outputs[0].text
    completion.next_prompt()
    assert completion.next_params().stop == [], "it is found here"
