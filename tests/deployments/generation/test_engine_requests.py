"""What the engine's answers to scoring requests become."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from deployments.failures import GenerationLost, GenerationNotFinite
from deployments.generation.engine_requests import scored_prompt_of, scoring_params
from deployments.protocols.generation import SamplingOptions, ScoredPrompt, ScoringRequest, packed_ids, packed_logprobs

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
    return ScoredPrompt(
        packed_ids(()),
        packed_logprobs(()),
        "length",
        prompt_logprobs=packed_logprobs(logprobs),
        top_token_ids=packed_ids(top_ids),
        top_logprobs=packed_logprobs(top),
        weight_version=version,
    )


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
