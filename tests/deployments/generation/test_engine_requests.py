"""What the engine's answers to scoring requests become."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from deployments.failures import GenerationLost, GenerationNotFinite, GenerationRejected
from deployments.generation.engine_outputs import _whole_positions
from deployments.generation.engine_requests import (
    generation_of,
    likeliest_tokens,
    sampling_params,
    scored_prompt_of,
    scoring_params,
)
from deployments.protocols.generation import (
    GenerationRequest,
    IncludedColumns,
    SamplingOptions,
    ScoredPrompt,
    ScoringRequest,
    packed_ids,
    packed_logprobs,
)
from deployments.protocols.token_columns import packed_rows
from rollout_client.contract.messages import NumberType

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
PROMPT = [5, 6, 7]


def request(top_k: int = 0, start: int = 0) -> ScoringRequest:
    return ScoringRequest("s", PROMPT, 1, (), SamplingOptions(), top_k=top_k, start=start)


def flat(token_ids: list[int], logprobs: list[float]) -> FlatLogprobs:
    values = FlatLogprobs()
    values.token_ids, values.logprobs = token_ids, logprobs
    return values


def output(prompt: FlatLogprobs | None, generated: FlatLogprobs | None = None, end: str = "length") -> RequestOutput:
    spans: Any = [SimpleNamespace(version="7", start=0, end=1)]
    completion = CompletionOutput(0, "", [1], None, generated, finish_reason=end, weight_versions=spans)
    return RequestOutput("s", None, PROMPT, prompt, [completion], finished=True)


def scored(
    logprobs: list[float], version: str = "7", top_ids: Sequence[int] = (), top: Sequence[float] = ()
) -> ScoredPrompt:
    columns: Any = {"top_token_ids": packed_ids(top_ids), "top_logprobs": packed_logprobs(top)}
    scores = packed_logprobs(logprobs)
    nothing = packed_ids(()), packed_logprobs(())
    return ScoredPrompt(*nothing, "length", prompt_logprobs=scores, weight_version=version, **columns)


def test_each_position_but_the_first_has_a_log_probability() -> None:
    prompt = flat([6, 7], [-1.0, -2.0])
    assert scored_prompt_of(request(), output(prompt), None, False) == scored([-1.0, -2.0])
    assert scored_prompt_of(request(start=2), output(prompt), None, False) == scored([-2.0])
    assert scored_prompt_of(request(), output(prompt), "run-b/9", False) == scored([-1.0, -2.0], version="run-b/9")


def test_the_most_likely_tokens_follow_the_asked_one_of_each_position() -> None:
    prompt = flat([6, 1, 2, 7, 3, 4], [-1.0, -0.1, -0.2, -2.0, -0.3, -0.4])
    expected = scored([-1.0, -2.0], top_ids=[1, 2, 3, 4], top=[-0.1, -0.2, -0.3, -0.4])
    assert scored_prompt_of(request(top_k=2), output(prompt), None, False) == expected


def test_a_last_token_that_stands_apart_follows_the_generated_one() -> None:
    answered = output(flat([6], [-1.0]), flat([1, 7], [-0.5, -2.0]))
    assert scored_prompt_of(request(), answered, None, True) == scored([-1.0, -2.0])
    assert scoring_params(request(), True).logprob_token_ids == [7]
    assert scoring_params(request(), False).logprob_token_ids is None


@pytest.mark.parametrize(
    "answered", [output(None), output(flat([6], [-1.0])), output(flat([6, 7], [-1.0, -2.0]), end="error")]
)
def test_an_incomplete_score_is_lost(answered: RequestOutput) -> None:
    with pytest.raises(GenerationLost):
        scored_prompt_of(request(), answered, None, False)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_score_that_is_not_finite_fails(value: float) -> None:
    with pytest.raises(GenerationNotFinite):
        scored_prompt_of(request(), output(flat([6, 7], [-1.0, value])), None, False)


# What is included beside the log-probabilities

GENERATED = [30, 31]


def generation_request(top_k: int = 2, experts_from: int = 0, **include: Any) -> GenerationRequest:
    return GenerationRequest(
        "g", PROMPT, 9, (), SamplingOptions(top_k=top_k), include=IncludedColumns(**include), experts_from=experts_from
    )


def completion_of(
    request: GenerationRequest, likeliest: Sequence[Mapping[int, float]], experts: Any = None
) -> CompletionOutput:
    """A completion of the tokens `GENERATED`; what vLLM does not let be sampled has a log-probability of -inf."""
    each, ids, logprobs = likeliest_tokens(request), list[int](), list[float]()
    for token_id, named in zip(GENERATED, likeliest, strict=True):
        rest = max(each - len(named), 0)
        ids += [token_id, *[*named, *range(100, 100 + rest)][:each]]
        logprobs += [named.get(token_id, -1.0), *[*named.values(), *[-math.inf] * rest][:each]]
    return CompletionOutput(
        0, "", GENERATED, None, flat(ids, logprobs), finish_reason="length", weight_versions=[], routed_experts=experts
    )


@given(st.integers(1, 6), st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 5))
def test_positions_from_dicts_have_the_sampled_token_again(named: int, sampled: list[int], joined_from: int) -> None:
    """A sampled token may be the likeliest one, any other that is named, or none of these."""
    direct, later = FlatLogprobs(), FlatLogprobs()
    for place, rank in enumerate(sampled):
        likeliest = [100 * place + each for each in range(named)]
        token = likeliest[rank] if rank < named else 99
        ids, ranks = [token, *likeliest], chain([rank + 1], range(1, named + 1))
        part = direct if place < joined_from else later
        part.append_fast(ids, [-float(one) for one in ids], ranks, [None] * len(ids))
    # As vLLM does it, whole or in a part.
    joined = direct[:]
    joined.extend(later)
    expected = direct.token_ids + later.token_ids
    found = _whole_positions(joined, named)
    assert found.token_ids == expected
    assert found.logprobs == [-float(one) for one in expected]
    assert len(found) == len(sampled)


HALVES = {30: math.log(0.5), 40: math.log(0.5)}
ONE = {31: 0.0}


def test_tokens_with_a_finite_log_probability_could_be_sampled() -> None:
    request = generation_request(sampling_mask=True, entropy=True, top_logprobs=2)
    generation = generation_of(completion_of(request, [HALVES, ONE]), None, request)
    assert list(generation.logprobs) == pytest.approx([math.log(0.5), 0.0])
    assert generation.columns == {
        "top_token_ids": packed_rows([30, 40, 31, 100], "int32", [2]),
        "top_logprobs": packed_rows([*HALVES.values(), 0.0, -math.inf], "float32", [2]),
        "sampling_mask": packed_rows([30, 40, 31], "int32"),
        "sampling_mask_sizes": packed_rows([2, 1], "uint16"),
        "entropy": packed_rows([math.log(2), 0.0], "float32"),
    }


def test_more_tokens_than_vllm_names_are_no_sampling_mask() -> None:
    request = generation_request(sampling_mask=True)
    named = {place: math.log(0.01) for place in range(likeliest_tokens(request))}
    with pytest.raises(GenerationRejected, match="more than 32 tokens share the last place of top_k 2"):
        generation_of(completion_of(request, [named, ONE]), None, request)


def test_vllm_names_so_many_tokens_as_the_columns_need() -> None:
    deep = {"top_logprobs": 50, "sampling_mask": True}
    asked: list[dict[str, Any]] = [{}, {"top_logprobs": 5}, {"entropy": True}, deep]
    assert [likeliest_tokens(generation_request(**include)) for include in asked] == [0, 5, 34, 50]
    request = generation_request(experts_from=2, routed_experts=True)
    assert (sampling_params(request).logprobs, sampling_params(request).routed_experts_prompt_start) == (0, 2)


@pytest.mark.parametrize(("experts", "dtype"), [(256, "uint8"), (257, "uint16")])
def test_experts_are_the_smallest_numbers_that_hold_them(experts: int, dtype: NumberType) -> None:
    request = generation_request(experts_from=2, routed_experts=True)
    # The last token of the prompt, and the first that was generated.
    rows = np.array([[[1, 2]], [[3, 4]]], np.int32)
    generation = generation_of(completion_of(request, [ONE, ONE], rows), None, request, experts)
    assert generation.columns == {"routed_experts": packed_rows([1, 2, 3, 4], dtype, [1, 2])}


@pytest.mark.parametrize(
    ("token_ids", "end", "experts_from"), [([30], "stop", len(PROMPT)), ([], "abort", 0), ([], "abort", 2)]
)
def test_a_generation_without_due_experts_is_not_lost(token_ids: list[int], end: str, experts_from: int) -> None:
    request = generation_request(experts_from=experts_from, routed_experts=True)
    logprobs = flat(token_ids, [-1.0] * len(token_ids))
    completion = CompletionOutput(0, "", token_ids, None, logprobs, finish_reason=end, weight_versions=[])
    generation = generation_of(completion, None, request, 8)
    assert (list(generation.token_ids), generation.finish_reason, generation.columns) == (token_ids, end, {})


@pytest.mark.parametrize("rows", [None, np.zeros((1, 1, 2), np.int32)])
def test_experts_that_the_engine_has_not_returned_are_missed(rows: Any) -> None:
    request = generation_request(experts_from=2, routed_experts=True)
    with pytest.raises(GenerationLost, match=r"The engine gave the experts of (none|1) of 2 tokens"):
        generation_of(completion_of(request, [ONE, ONE], rows), None, request, 8)
