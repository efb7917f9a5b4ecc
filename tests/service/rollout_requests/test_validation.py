"""What is wrong with a request, found without playing anything."""

import base64
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from deployments.protocols.replicas import GeneratorDescription
from deployments.protocols.token_columns import numbers_of
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.rollouts import RolloutRequest
from service.rollout_requests.validation import Capabilities, keep_problems, request_problems
from service.settings import RequestLimits
from tests.service.rollout_requests.test_task_samples import service

SAMPLE: dict[str, Any] = {"task_name": "math", "messages": [{"role": "user", "content": "Hi"}]}
RANGE = {"task_name": "math", "count": 2}
CAPABILITIES = Capabilities(
    frozenset({"math", "chess"}), GeneratorDescription("tiny", 100, 262), RequestLimits(max_rollouts_per_request=6)
)
VARIED = {"reward_std": {"gt": 0}}
Problem = tuple[str, Any, str]
"""Of a field, its value, and what its message says."""


def problems(request: dict[str, Any], capabilities: Capabilities = CAPABILITIES) -> list[Problem]:
    return told(request_problems(RolloutRequest.model_validate({"samples": [SAMPLE], **request}), capabilities))


def told(found: Iterable[FieldProblem]) -> list[Problem]:
    return [(problem.field, problem.value, problem.message) for problem in found]


def test_a_request_at_every_limit_has_no_problem() -> None:
    """What is over a limit is refused at the route: `routes/test_bad_requests.py`."""
    samples, keep = [SAMPLE, {**SAMPLE, "task_name": "chess"}], {"groups": 2, "per_group": 3}
    assert problems({"samples": samples, "num_generations": 3, "max_seq_len": 100, "keep": keep}) == []


def test_all_problems_are_found_at_once() -> None:
    samples = [{**SAMPLE, "task_name": "go"}, {**SAMPLE, "reward": 1, "status": 2}]
    found = problems({"samples": samples, "max_seq_len": 200, "keep": {"groups": 3, "per_group": 2}})
    fields = ["max_seq_len", "keep.per_group", "keep.groups", "samples[0].task_name", "samples[1].status"]
    assert [field for field, _, _ in found] == fields


# Groups that are selected


def kept(keep: dict[str, Any], samples: int = 0, **fields: Any) -> list[Problem]:
    drawn = {"samples": [SAMPLE] * samples} if samples else {"samples_from": [RANGE]}
    return told(keep_problems(RolloutRequest.model_validate({**drawn, "num_generations": 4, "keep": keep, **fields})))


@pytest.mark.parametrize(
    ("keep", "fields"),
    [
        ({"groups": 9, "where": VARIED}, {}),
        ({"groups": 2, "where": VARIED, "per_group": 2, "draw_at_most": 3}, {"samples": 3}),
        ({"groups": 1, "where": {"reward_mean": {"gt": 0}}}, {"num_generations": 1}),
        ({"groups": 1, "where": {"rewards": {"form": {"mean": {"ge": 1, "le": 1}}}}}, {}),
        ({"groups": 1, "where": {"reward_std": {"le": 0}}}, {"num_generations": 1}),
    ],
)
def test_groups_are_selected_of_endless_ranges_or_enough_samples(keep: dict[str, Any], fields: dict[str, Any]) -> None:
    assert kept(keep, **fields) == []


MISSING = "it is missing, and keep.where draws samples until so many groups are kept; send it"
TOO_FEW = "there are only 2 groups, one per sample; keep fewer, or draw more"
LOCKSTEP = "keep.where draws further groups while others play, which have no turns in lockstep; choose async"


@pytest.mark.parametrize(
    ("keep", "fields", "problem"),
    [
        ({}, {}, ("keep.groups", None, MISSING)),
        ({"groups": 3, "draw_at_most": 2}, {}, ("keep.groups", 3, TOO_FEW)),
        ({"groups": 3}, {"samples": 2}, ("keep.groups", 3, TOO_FEW)),
        ({"groups": 1}, {"schedule": "lockstep"}, ("schedule", "lockstep", LOCKSTEP)),
    ],
)
def test_an_impossible_selection_is_refused(keep: dict[str, Any], fields: dict[str, Any], problem: Problem) -> None:
    assert kept({**keep, "where": VARIED}, **fields) == [problem]


def test_a_refused_request_over_a_range_reads_no_sample_and_starts_nothing() -> None:
    http = service()
    keep = {"groups": 3, "where": VARIED, "draw_at_most": 2}
    refused = http.post({"samples_from": [{**RANGE, "split": "lost"}], "num_generations": 2, "keep": keep})
    assert (refused.status_code, [error["field"] for error in refused.json()["errors"]]) == (422, ["keep.groups"])
    assert not http.has_started_something


# What is included


def included(request: dict[str, Any], **described: Any) -> list[Problem]:
    return problems(request, replace(CAPABILITIES, generator=GeneratorDescription("tiny", 100, 262, **described)))


def test_engines_that_have_what_is_included_are_asked_for_it() -> None:
    request = {"include": ["routed_experts", "top_logprobs:64", "sampling_mask", "entropy"], "sampling": {"top_k": 32}}
    assert included(request, max_logprobs=64, returns_experts=True) == []
    assert included({"include": ["top_logprobs:100000", "entropy"], "sampling": {"top_k": 99999}}) == []


NO_EXPERTS = (
    "the engines do not return the experts of tokens; serve a mixture of experts with "
    "enable_return_routed_experts: true under engine"
)
FEW_LOGPROBS = "the engines name at most 64 tokens; ask for fewer, or raise max_logprobs under engine"
UNBOUNDED = "it needs sampling.top_k from 1 to 32: without a bound all tokens of the vocabulary could be sampled"
GREEDY = "greedy decoding draws from no distribution; leave it out, or set sampling.temperature"


def test_min_p_is_refused_where_engines_draft_tokens() -> None:
    request, message = {"sampling": {"min_p": 0.1}}, "the engines draft tokens (ngram), and vLLM has no min_p then"
    assert included(request) == included({}, drafts="ngram") == []
    assert included(request, drafts="ngram") == [("sampling.min_p", 0.1, f"{message}; leave it out")]


@pytest.mark.parametrize(
    ("name", "sampling", "message"),
    [
        ("routed_experts", {}, NO_EXPERTS),
        ("top_logprobs:65", {}, FEW_LOGPROBS),
        ("entropy", {}, UNBOUNDED),
        ("sampling_mask", {"top_k": 33}, UNBOUNDED),
        ("entropy", {"top_k": 5, "temperature": 0}, GREEDY),
    ],
)
def test_what_the_engines_or_the_sampling_lack_is_refused(name: str, sampling: dict[str, Any], message: str) -> None:
    assert included({"include": [name], "sampling": sampling}, max_logprobs=64) == [("include[0]", name, message)]


UNKNOWN = "'routed_experts', 'sampling_mask', 'entropy' or 'top_logprobs:N'"


@pytest.mark.parametrize(
    ("include", "message"),
    [
        *(([name], UNKNOWN) for name in ("experts", "top_logprobs", "top_logprobs:0", "top_logprobs:x", "Entropy", "")),
        (["top_logprobs:2", "top_logprobs:3"], "top_logprobs is named 2 times: name it once"),
    ],
)
def test_what_is_included_is_known_and_named_once(include: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutRequest.model_validate({"samples": [SAMPLE], "include": include})


# Columns of a posted log


def column(dtype: str, shape: list[int], data: bytes) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data": base64.b64encode(data).decode()}


def post_columns(**columns: Any) -> RolloutRequest:
    message = {"role": "assistant", "content": "a", "token_ids": [1, 2], "generation_logprobs": [-1.0, -1.0]}
    return RolloutRequest.model_validate({"samples": [{"task_name": "math", "message_log": [message | columns]}]})


SIZES = column("uint16", [2], b"\x01\0\x02\0")
MASK = column("int32", [2], bytes(8))
ROWS = "rows in place of {}: send one for each token"


def test_columns_that_have_a_row_for_each_token_are_taken() -> None:
    posted = post_columns(
        routed_experts=column("uint8", [1, 2, 2], bytes(4)),
        top_token_ids=column("int32", [2, 3], bytes(24)),
        top_logprobs=column("float32", [2, 3], bytes(24)),
        sampling_mask=column("int32", [3], bytes(12)),
        sampling_mask_sizes=SIZES,
        entropy=None,
    )
    [message] = posted.samples[0].message_log or []
    assert message.sampling_mask == numbers_of(bytes(12), "int32")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"routed_experts": column("uint8", [3, 1, 1], bytes(3))}, f"routed_experts has 3 {ROWS.format(2)}"),
        ({"routed_experts": column("uint8", [2, 0, 8], b"")}, r"a row of shape \[0, 8\] has no number"),
        ({"entropy": column("int32", [2], bytes(8))}, r"int32 of shape \[2\]: send float32 with 1 dimensions"),
        ({"sampling_mask": MASK, "sampling_mask_sizes": SIZES}, f"sampling_mask has 2 {ROWS.format(3)}"),
        ({"sampling_mask": MASK}, "sampling_mask needs sampling_mask_sizes for 2 token_ids: send both"),
        ({"sampling_mask_sizes": SIZES}, "sampling_mask_sizes needs a sampling_mask: send both"),
        ({"entropy": column("float32", [2, *[1] * 8], bytes(8))}, "at most 8 items"),
        ({"entropy": column("float32", [2**31], b"")}, "less than 2147483648"),
        ({"entropy": {"dtype": "float32", "shape": [2], "data": "AAAA*"}}, "Only base64 data is allowed"),
    ],
)
def test_columns_that_are_not_those_of_the_tokens_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        post_columns(**columns)
