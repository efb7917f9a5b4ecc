"""Completions that updates of the weights interrupt: their requests, and their outputs as those of one request.

Streams are interrupted within characters and stop strings too, with a real tokenizer.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from deployments.generation.continued_completion import ContinuedCompletion, params_of_choice
from deployments.protocols.generation import derived_seed
from deployments.upstream.vllm.token_texts import detokenizer_of
from tests.paths import SMALL_MODEL

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
PROMPT = [1, 2, 3]
FINAL, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def params(kind: RequestOutputKind = FINAL, **given: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, seed=7, logprobs=0, output_kind=kind, **given)


def output(
    text: str, finish_reason: str | None = None, version: str = "0", tokens: int | None = None, flat: bool = True
) -> RequestOutput:
    """Args: `tokens`: of the request so far, where the output has a part of them."""
    ids = list(map(ord, text))
    logprobs: Any = FlatLogprobs() if flat else []
    for token_id in ids:
        logprobs.append({token_id: Logprob(-token_id / 100)})
    spans = None if finish_reason is None else [WeightVersionSpan(version, 0, len(ids) if tokens is None else tokens)]
    completion = CompletionOutput(0, text, ids, -1.0, logprobs, finish_reason=finish_reason, weight_versions=spans)
    return RequestOutput("id", None, [9], None, [completion], finish_reason is not None, num_cached_tokens=2)


def completion_of(sampling: SamplingParams, index: int = 0) -> ContinuedCompletion:
    return ContinuedCompletion(PROMPT, sampling, SimpleNamespace(decode=text_of), index)


def spans_of(whole: RequestOutput) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in whole.outputs[0].weight_versions or ()]


@pytest.mark.parametrize("flat", [True, False])
def test_what_was_interrupted_goes_on_after_its_tokens_as_one_completion(flat: bool) -> None:
    completion = completion_of(params(min_tokens=5), index=3)
    assert (completion.next_prompt(), completion.next_params()) == (PROMPT, params(min_tokens=5))
    assert completion.interrupt(completion.add(output("ab", "abort", flat=flat), None))
    assert completion.next_prompt() == [*PROMPT, *map(ord, "ab")]
    rest = completion.next_params()
    assert (rest.max_tokens, rest.min_tokens, rest.seed) == (98, 3, derived_seed(7, 2))
    whole = completion.add(output("cde", "stop", "1", flat=flat), None)
    [made] = whole.outputs
    assert (made.text, made.token_ids, made.finish_reason, made.index) == ("abcde", list(map(ord, "abcde")), "stop", 3)
    assert made.logprobs is not None
    assert [list(position) for position in made.logprobs if position] == [[ord(letter)] for letter in "abcde"]
    assert made.cumulative_logprob == -2.0
    assert spans_of(whole) == [("0", 0, 2), ("1", 2, 5)]
    assert (whole.prompt_token_ids, whole.num_cached_tokens) == (PROMPT, 2)


def rows(first: int, end: int) -> Any:
    return np.arange(first, end).reshape(-1, 1, 1)


def with_rows(made: RequestOutput, first: int, end: int) -> RequestOutput:
    made.outputs[0].routed_experts = rows(first, end)
    return made


@pytest.mark.parametrize("kind", [FINAL, DELTA])
def test_each_token_keeps_the_experts_that_sampled_the_one_after_it(kind: RequestOutputKind) -> None:
    completion = completion_of(params(kind, routed_experts_prompt_start=1))
    completion.next_prompt()
    assert completion.next_params().routed_experts_prompt_start == 1
    first = completion.add(with_rows(output("ab", "abort"), 1, 4), None)
    assert completion.interrupt(first)
    assert first.outputs[0].routed_experts is None, "nobody sees the rows of a part"
    completion.next_prompt()
    assert completion.next_params().routed_experts_prompt_start == 4
    # The next request is interrupted before its first token.
    assert completion.interrupt(completion.add(output("", "abort"), None))
    completion.next_prompt()
    assert completion.next_params().routed_experts_prompt_start == 4
    last = completion.add(with_rows(output("cd", "stop"), 4, 6), None).outputs[0].routed_experts
    assert last is not None
    assert last.tolist() == rows(1, 6).tolist()


def test_a_completion_that_begins_anew_asks_for_all_experts_again() -> None:
    completion = completion_of(params(structured_outputs=StructuredOutputsParams(regex="a+")))
    completion.next_prompt()
    first = completion.add(with_rows(output("ab", "abort"), 0, 4), None)
    assert completion.interrupt(first)
    assert first.outputs[0].routed_experts is None
    completion.next_prompt()
    assert completion.next_params().routed_experts_prompt_start == 0
    made = completion.add(with_rows(output("abc", "stop"), 0, 5), None).outputs[0].routed_experts
    assert made is not None
    assert made.tolist() == rows(0, 5).tolist()


def test_an_adapters_label_is_that_of_the_tokens_that_it_made() -> None:
    completion = completion_of(params())
    assert completion.interrupt(completion.add(output("ab", "abort"), "run/1"))
    completion.next_prompt()
    assert spans_of(completion.add(output("c", "stop"), "run/2")) == [("run/1", 0, 2), ("run/2", 2, 3)]


ENDS_OPEN = [
    (params(stop=["ab"]), "xa"),
    (params(), "x\N{REPLACEMENT CHARACTER}"),
    (params(structured_outputs=StructuredOutputsParams(json="{}")), "{"),
    (params(presence_penalty=0.5), "a"),
]


@pytest.mark.parametrize(("sampling", "made"), ENDS_OPEN, ids=["stop string", "character", "schema", "penalty"])
def test_what_cannot_be_continued_begins_anew(sampling: SamplingParams, made: str) -> None:
    completion = completion_of(sampling)
    assert completion.interrupt(completion.add(output(made, "abort"), None))
    assert (completion.next_prompt(), completion.next_params()) == (PROMPT, sampling)
    assert completion.add(output("anew", "stop"), None).outputs[0].text == "anew"


@pytest.mark.parametrize(("sampling", "made"), ENDS_OPEN[2:], ids=["schema", "penalty"])
def test_a_stream_whose_tokens_depend_on_those_before_them_ends(sampling: SamplingParams, made: str) -> None:
    sampling.output_kind = DELTA
    stream = completion_of(sampling)
    stream.add(output(made), None)
    ending = stream.add(output("", "abort", tokens=len(made)), None)
    assert not stream.interrupt(ending)
    assert ending.outputs[0].finish_reason == "abort"


def test_each_choice_has_the_seed_that_vllm_gives_it() -> None:
    each = [params_of_choice(params(n=3), index) for index in range(3)]
    assert [(one.n, one.seed) for one in each] == [(1, 7), (1, 8), (1, 9)]


@pytest.mark.parametrize("kind", [FINAL, DELTA])
@pytest.mark.parametrize(
    "given",
    [{"prompt_logprobs": 1}, {"presence_penalty": 0.5}, {"structured_outputs": StructuredOutputsParams(json="{}")}],
    ids=["prompt's log-probabilities", "penalty", "schema"],
)
def test_what_is_interrupted_before_its_first_token_begins_anew(kind: RequestOutputKind, given: dict[str, Any]) -> None:
    sampling = params(kind, **given)
    completion = completion_of(sampling)
    cut = output("", "abort")
    cut.prompt_logprobs = [None]
    assert completion.interrupt(completion.add(cut, None))
    assert (cut.outputs[0].finish_reason, cut.finished) == (None, False)
    assert (completion.next_prompt(), completion.next_params()) == (PROMPT, sampling)
    whole = output("a", "stop")
    whole.prompt_logprobs = [None, {2: Logprob(-0.5)}, {3: Logprob(-0.25)}]
    assert completion.add(whole, None).prompt_logprobs == [None, {2: Logprob(-0.5)}, {3: Logprob(-0.25)}]


def test_a_prompts_log_probabilities_are_those_of_the_first_weights() -> None:
    completion = completion_of(params(prompt_logprobs=1))
    first = output("ab", "abort")
    first.prompt_logprobs = [None, {2: Logprob(-0.5)}]
    assert completion.interrupt(completion.add(first, None))
    completion.next_prompt()
    assert completion.next_params().prompt_logprobs is None
    whole = completion.add(output("c", "stop", "1"), None)
    assert (whole.prompt_logprobs, spans_of(whole)) == ([None, {2: Logprob(-0.5)}], [("0", 0, 2), ("1", 2, 3)])


tokenizer: Any = AutoTokenizer.from_pretrained(SMALL_MODEL)
SPECIAL = "<|im_start|>"
SAID: list[int] = tokenizer.encode("Say it: é", add_special_tokens=False)


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
    completion = ContinuedCompletion(SAID, params, tokenizer)
    text, ids, ended = "", list[int](), None
    for version in range(len(steps) + 1):
        prompt, asked = completion.next_prompt(), completion.next_params()
        request = EngineRequest(prompt, asked, token_ids[len(prompt) - len(SAID) :], str(version))
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
