"""Batches are divided into messages within bounds, and sizes are not estimated too low."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.failures import EnvironmentBroken, RolloutFailure
from deployments.generation.generator_replica_base import _bytes_of_generation
from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import (
    Generation,
    GenerationRequest,
    SamplingOptions,
    ScoredPrompt,
    WeightSpan,
    packed_ids,
    packed_logprobs,
)
from deployments.protocols.token_columns import EXPERTS, numbers_of
from deployments.rpc.batching import MOST_BYTES_PER_MESSAGE, bytes_of_generation_request, bytes_of_step_result, divided
from deployments.sessions.records import ChatContext, EngineCall, GeneratedMessage, Plan
from deployments.sessions.store import _bytes_of_add
from rollout_env import StepOutcome
from service.remote.environment import _bytes_of_step_request

SIZES = st.lists(st.integers(0, 2 * MOST_BYTES_PER_MESSAGE) | st.integers(0, MOST_BYTES_PER_MESSAGE // 8), max_size=30)
OVERHEAD_BYTES = 200
"""Of a pickled record without its texts and tokens."""


@given(SIZES, st.none() | st.integers(1, 5))
def test_nothing_is_lost_and_messages_are_as_large_as_bounds_allow(sizes: list[int], most_items: int | None) -> None:
    items = list(enumerate(sizes))
    messages = list(divided(items, lambda item: item[1], most_items))
    assert [item for message in messages for item in message] == items
    totals = [sum(size for _, size in message) for message in messages]
    for message, total in zip(messages, totals, strict=True):
        assert len(message) == 1 or total <= MOST_BYTES_PER_MESSAGE
        assert 1 <= len(message) <= (most_items or len(items))
    for message, total, after in zip(messages, totals, messages[1:], strict=False):
        assert len(message) == most_items or total + after[0][1] > MOST_BYTES_PER_MESSAGE


def test_a_single_item_is_sent_without_asking_for_its_size() -> None:
    assert list(divided(["a"], lambda _: pytest.fail("asked"))) == [["a"]]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=99),
    lambda values: st.lists(values, max_size=8) | st.dictionaries(st.text(max_size=20), values, max_size=8),
    max_leaves=10,
)
TEXTS = st.text(max_size=2000)


@given(st.lists(TEXTS, max_size=4), st.dictionaries(st.text(max_size=20), JSON, max_size=4))
def test_a_step_request_is_not_much_larger_than_estimated(contents: list[str], extra_env_info: dict[str, Any]) -> None:
    request = StepRequest([{"role": "user", "content": content} for content in contents], extra_env_info)
    assert len(pickle.dumps(request)) <= 1.5 * _bytes_of_step_request(request) + OVERHEAD_BYTES


@given(TEXTS, st.none() | st.dictionaries(st.text(max_size=20), JSON, max_size=4), st.none() | TEXTS)
def test_results_hardly_exceed_the_estimate(content: str, metadata: dict[str, Any] | None, answer: str | None) -> None:
    result = StepOutcome({"role": "user", "content": content}, 1.0, True, metadata, ["stop"], answer)
    assert len(pickle.dumps(result)) <= 1.5 * bytes_of_step_result(result) + OVERHEAD_BYTES


@pytest.mark.parametrize("tokens", [0, 10, 100_000])
def test_generations_and_their_requests_are_not_much_larger_than_estimated(tokens: int) -> None:
    ids = packed_ids(range(tokens))
    request = GenerationRequest("a", ids, 10, ("stop",), SamplingOptions(), rollout_id="r", group="g", request_id="q")
    assert len(pickle.dumps(request)) <= 1.1 * bytes_of_generation_request(request) + OVERHEAD_BYTES
    result = Generation(ids, packed_logprobs([0.0] * tokens), "stop", (WeightSpan("1", 0, tokens),))
    assert len(pickle.dumps(result)) <= 1.1 * _bytes_of_generation(result) + OVERHEAD_BYTES
    logprobs = packed_logprobs([0.0] * tokens)
    scored = ScoredPrompt((), (), "length", prompt_logprobs=logprobs, top_token_ids=ids, top_logprobs=logprobs)
    assert len(pickle.dumps(scored)) <= 1.1 * _bytes_of_generation(scored) + OVERHEAD_BYTES


def test_columns_count_in_the_messages_of_generations_and_of_sessions() -> None:
    tokens = 10_000
    ids, logprobs = packed_ids(range(tokens)), packed_logprobs([0.0] * tokens)
    columns = {EXPERTS: numbers_of(bytes(16 * tokens), "uint8", [2, 8])}
    generation = Generation(ids, logprobs, "stop", columns=columns)
    assert len(pickle.dumps(generation)) <= 1.1 * _bytes_of_generation(generation)
    made = GeneratedMessage("a", {}, "", ids, logprobs, "stop", columns=columns)
    call = EngineCall("a", ChatContext(), Plan(None, 0, (), ()), [], (), [made])
    assert len(pickle.dumps(call)) <= 1.1 * _bytes_of_add(("s", call))


@pytest.mark.parametrize("bytes_of", [_bytes_of_generation, bytes_of_step_result])
def test_the_message_of_a_failure_counts(bytes_of: Any) -> None:
    failure: RolloutFailure = EnvironmentBroken("x" * 100_000)
    assert 100_000 <= bytes_of(failure) <= 101_000


@pytest.mark.parametrize("value", [2**70, "\ud800"])
def test_values_that_json_writers_refuse_have_a_size(value: object) -> None:
    assert _bytes_of_step_request(StepRequest([], {"value": value})) > 0
