"""Large bodies are parsed in another process, with the same result and the same refusals as small ones."""

import asyncio
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.contract.base import Problem
from rollout_client.contract.rollouts import RolloutRequest
from service.problems import RequestProblem
from service.rollout_requests import body_parser
from service.rollout_requests.body_parser import MOST_BYTES_INLINE, BodyParser
from service.rollout_requests.parsing import (
    MOST_FIELDS,
    SAMPLES_AT_ONCE,
    BodyBounds,
    ParsedScoreRequest,
    ScoreBounds,
    joined_request,
    parsed_body,
    request_parts,
)
from tests.drawn_models import json_values
from tests.virtual_time import runs

SAMPLE: dict[str, Any] = {"task_name": "math", "messages": [{"role": "user", "content": "Hi"}]}
BOUNDS = BodyBounds(max_rollouts=1000, max_sample_bytes=100_000)
PADDING = b" " * MOST_BYTES_INLINE


@pytest.fixture(scope="module")
def parser() -> Iterator[BodyParser]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_parser, "PROCESSES", 1)
        parser = BodyParser(BOUNDS)
        yield parser
        parser.close()


def parse(parser: BodyParser, body: bytes) -> RolloutRequest:
    return asyncio.run(parser.parse(body))


def refused(body: bytes, bounds: BodyBounds = BOUNDS) -> Problem:
    """The problem of a body that is parsed as a large one is."""
    with pytest.raises(RequestProblem) as raised:
        list(request_parts(body, bounds))
    return raised.value.problem


def request(**fields: Any) -> bytes:
    return json.dumps({"samples": [SAMPLE], **fields}).encode()


@pytest.mark.slow
def test_only_a_body_over_the_threshold_goes_to_a_process(parser: BodyParser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_parser, "request_parts", parts_that_name_their_process)
    body = request().ljust(MOST_BYTES_INLINE)
    assert (parse(parser, body).samples[0].id, parse(parser, body + b" ").samples[0].id) == (None, "elsewhere")


def parts_that_name_their_process(body: bytes, **bounds: Any) -> Iterator[Any]:
    options, *samples = request_parts(body, **bounds)
    yield options
    is_here = multiprocessing.parent_process() is None
    yield from ({**sample, "id": "here" if is_here else "elsewhere"} for sample in samples)


def test_a_large_body_gives_the_same_request_as_a_small_one(parser: BodyParser) -> None:
    samples = [{**SAMPLE, "idx": place, "note": "x" * 1000, "list": [1, None, 2.5]} for place in range(300)]
    options = {"num_generations": 2, "sampling": {"seed": 3}, "keep": {"per_group": 1}}
    body = request(samples=samples, **options)
    assert len(body) > MOST_BYTES_INLINE
    parsed = parse(parser, body)
    assert parsed == parsed_body(body)
    assert parsed.model_fields_set == {"samples", *options}


@pytest.mark.slow
def test_a_large_report_gives_the_same_numbers_as_a_small_one(parser: BodyParser) -> None:
    report = {"rollout_id": "r", "logprobs": [-0.5, None], "mask": [True, False], "token_ids": [7, 8], "start": 1}
    body = json.dumps({"reports": [report, report]}).encode()
    for each in (body, body + PADDING):
        first, second = asyncio.run(parser.parse_reports(each))
        assert (first.rollout_id, first.weight_version, first.start) == ("r", None, 1)
        np.testing.assert_array_equal(first.logprobs, [-0.5, np.nan])
        assert first.mask is not None
        assert first.token_ids is not None
        assert (first.mask.tolist(), first.token_ids.tolist()) == ([True, False], [7, 8])
        assert second.rollout_id == "r"


@pytest.mark.slow
def test_a_large_body_is_freed_where_it_was_sent(parser: BodyParser) -> None:
    body = bytearray(request() + PADDING)
    asyncio.run(parser.parse(body))
    assert body == b""


@pytest.mark.slow
def test_a_refusal_crosses_the_processes(parser: BodyParser) -> None:
    with pytest.raises(RequestProblem) as raised:
        parse(parser, request(num_generation=1) + PADDING)
    assert raised.value.problem == refused(request(num_generation=1))
    with pytest.raises(RequestProblem) as raised:
        parse(parser, b"{" + PADDING)
    assert raised.value.problem.status == 400
    # The process goes on.
    assert parse(parser, request() + PADDING) == parsed_body(request())


def kill_own_process(*_: object, **__: object) -> Iterator[Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield None


@pytest.mark.slow
def test_a_process_that_dies_is_503_and_is_replaced(parser: BodyParser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_parser, "request_parts", kill_own_process)
    with pytest.raises(RequestProblem) as raised:
        parse(parser, request() + PADDING)
    monkeypatch.undo()
    assert (raised.value.problem.status, raised.value.problem.errors[0].message) == (
        503,
        "The process that parses request bodies died, possibly out of memory",
    )
    assert parse(parser, request() + PADDING) == parsed_body(request())


def wait_for(path: str, *_: object, **__: object) -> Iterator[Any]:
    while not Path(path).exists():
        time.sleep(0.01)
    yield from request_parts(request(), BOUNDS)


@pytest.mark.slow
@runs
async def test_large_bodies_wait_for_each_other_and_small_ones_for_none(
    parser: BodyParser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    go_on = tmp_path / "go on"
    answered = parsed_body(request())
    monkeypatch.setattr(body_parser, "request_parts", partial(wait_for, str(go_on)))
    large = [asyncio.create_task(parser.parse(PADDING + b" ")) for _ in range(3)]
    small = await parser.parse(request())
    go_on.touch()
    assert [small, *await asyncio.gather(*large)] == [answered] * 4


@pytest.mark.slow
def test_a_large_body_of_sequences_is_parsed_in_a_process(parser: BodyParser) -> None:
    bounds = ScoreBounds(max_sequences=10_000, max_model_len=100, vocab_size=50)

    def parsed(*sequences: list[int]) -> ParsedScoreRequest:
        body = json.dumps({"sequences": sequences, "start": 1, "top_k": 2}).encode() + PADDING
        return asyncio.run(parser.parse_score_request(body, bounds))

    sequences = [[number % 50, 7, 8] * 30 for number in range(50)]
    request = parsed(*sequences)
    assert [list(sequence) for sequence in request.sequences] == sequences
    assert (request.tokens, request.top_k, request.starts[-1]) == (4500, 2, 1)
    with pytest.raises(RequestProblem) as raised:
        parsed([1, 2], [3, 50])
    assert [(error.field, error.value) for error in raised.value.problem.errors] == [("sequences[1][1]", 50)]


NAMES = ["id", "idx", "task_name", "messages", "message_log", "extra_env_info", "stop_strings", "seed", "tools", "x"]
some_samples = st.dictionaries(st.sampled_from(NAMES), json_values, max_size=4) | st.fixed_dictionaries(
    {"task_name": st.just("math"), "messages": st.just(SAMPLE["messages"])},
    optional={"x": json_values, "extra_env_info": json_values, "stop_strings": st.just(["a"]), "idx": json_values},
)
some_requests = st.fixed_dictionaries(
    {"samples": st.lists(some_samples, max_size=3)},
    optional={
        "num_generations": json_values,
        "sampling": json_values,
        "keep": st.just({"groups": 1}),
        "x": json_values,
    },
)


@given(some_requests)
def test_both_ways_give_the_same_request_or_name_the_same_fields(fields: dict[str, Any]) -> None:
    # The small way does not count rollouts: the service does it later.
    bounds = replace(BOUNDS, max_rollouts=10**100)
    body = json.dumps(fields).encode()
    by_step: RolloutRequest | Problem
    by_parts: RolloutRequest | Problem
    try:
        by_step = parsed_body(body)
    except RequestProblem as error:
        by_step = error.problem
    try:
        options, *samples = request_parts(body, bounds)
        by_parts = joined_request(options, samples)
    except RequestProblem as error:
        by_parts = error.problem
    assert by_parts == by_step


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nan_or_infinity_is_no_json(number: float) -> None:
    """Of a small body: `routes/test_bad_requests.py`."""
    assert refused(request(samples=[{**SAMPLE, "x": {"a": [0, number]}}])).status == 400


def test_the_first_20_problems_are_named_at_their_places_in_the_request() -> None:
    without_prompt = {"task_name": "math", "messages": []}
    samples = [SAMPLE] * SAMPLES_AT_ONCE + [without_prompt, SAMPLE, *[{**SAMPLE, "idx": "1"}] * 200]
    problem = refused(request(samples=samples))
    first = SAMPLES_AT_ONCE
    assert [error.field for error in problem.errors] == [
        f"samples[{first}].messages",
        *(f"samples[{place}].idx" for place in range(first + 2, first + 21)),
    ]


def nested(levels: int) -> bytes:
    """A request with a further field, which is at level 4: it is nested in `levels` levels."""
    return request(samples=[{**SAMPLE, "x": "@"}]).replace(b'"@"', b"[" * (levels - 3) + b"]" * (levels - 3))


@pytest.mark.parametrize("way", ["small", "large"])
def test_json_may_be_nested_in_201_levels_and_not_in_one_more(way: str) -> None:
    def parse(body: bytes) -> object:
        return parsed_body(body) if way == "small" else list(request_parts(body, BOUNDS))

    parse(nested(201))
    with pytest.raises(RequestProblem) as raised:
        parse(nested(202))
    problem = raised.value.problem
    assert problem.status == 400
    assert problem.errors[0].message.startswith("Invalid JSON: recursion limit exceeded")


def test_an_object_of_the_contract_may_have_64_fields_and_not_one_more() -> None:
    unknown = {f"x{place}": 1 for place in range(MOST_FIELDS)}
    message = {**SAMPLE["messages"][0], **unknown}
    cases = {
        "body": request(**unknown),
        "sampling": request(sampling={**unknown, "seed": 1}),
        "samples[0].messages[0]": request(samples=[{**SAMPLE, "messages": [message]}]),
    }
    for field, body in cases.items():
        [error] = refused(body).errors
        given_fields = int(str(error.value))
        assert (error.field, error.message) == (field, f"it has {given_fields} fields; send at most 64")
        assert given_fields > MOST_FIELDS
    del unknown["x0"]
    assert len(refused(request(**unknown)).errors) == 20


def test_a_sample_may_take_a_number_of_bytes_and_not_one_more() -> None:
    body = request(samples=[SAMPLE, {**SAMPLE, "x": "y" * 50_000}])
    [error] = refused(request(samples=[SAMPLE, {**SAMPLE, "x": "y" * 100_000}])).errors
    assert error.field == "samples[1]"
    size = int(str(error.value)) - 50_000
    assert error.message == f"it takes {size + 50_000} bytes, and a sample may take 100000; shorten it"
    list(request_parts(body, BodyBounds(10, size)))
    with pytest.raises(RequestProblem):
        list(request_parts(body, BodyBounds(10, size - 1)))


@pytest.mark.parametrize("num_generations", [1, 2])
def test_a_body_may_have_a_number_of_rollouts_and_not_one_sample_more(num_generations: int) -> None:
    allowed = BOUNDS.max_rollouts // num_generations
    list(request_parts(request(samples=[SAMPLE] * allowed, num_generations=num_generations), BOUNDS))
    [error] = refused(request(samples=[{}] * (allowed + 1), num_generations=num_generations)).errors
    assert (error.field, error.value) == ("samples", allowed + 1)
    expected = f"{allowed + 1} samples x {num_generations} generations is more than 1000 rollouts; split the request"
    assert error.message == expected


@pytest.mark.parametrize("num_generations", [0, -1, True, "1", None])
def test_a_wrong_number_of_generations_counts_as_one_until_it_is_reported(num_generations: Any) -> None:
    [error] = refused(request(samples=[SAMPLE] * 1000, num_generations=num_generations)).errors
    assert error.field == "num_generations"
    [error] = refused(request(samples=[SAMPLE] * 1001, num_generations=num_generations)).errors
    assert error.message == "1001 samples x 1 generations is more than 1000 rollouts; split the request"
