"""What is wrong with a request, found without playing anything."""

import base64
from dataclasses import replace
from typing import Any

import pytest

from deployments.protocols.replicas import GeneratorDescription
from deployments.protocols.token_columns import numbers_of
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.rollouts import RolloutRequest
from service.rollout_requests.validation import Capabilities, request_problems
from service.settings import RequestLimits

SAMPLE: dict[str, Any] = {"task_name": "math", "messages": [{"role": "user", "content": "Hi"}]}
CAPABILITIES = Capabilities(
    frozenset({"math", "chess"}), GeneratorDescription("tiny", 100, 262), RequestLimits(max_rollouts_per_request=6)
)


def problems(request: dict[str, Any]) -> list[FieldProblem]:
    return list(request_problems(RolloutRequest.model_validate({"samples": [SAMPLE], **request}), CAPABILITIES))


def logged(*token_ids: list[int]) -> dict[str, Any]:
    messages = [{"role": "user", "content": "a", "token_ids": ids} for ids in token_ids]
    return {"samples": [{"task_name": "math", "message_log": messages}]}


def test_a_request_at_every_limit_has_no_problem() -> None:
    request = {
        "samples": [SAMPLE, {**SAMPLE, "task_name": "chess"}],
        "num_generations": 3,
        "max_seq_len": 100,
        "keep": {"groups": 2, "per_group": 3},
    }
    assert problems(request) == []
    assert problems(logged([0, 261])) == []


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (
            {"samples": [SAMPLE] * 7},
            FieldProblem(
                field="samples",
                message="7 samples x 1 generations is more than 6 rollouts; split the request",
                value=7,
            ),
        ),
        (
            {"max_seq_len": 101},
            FieldProblem(field="max_seq_len", message="the model takes at most 100 tokens; ask for no more", value=101),
        ),
        (
            {"num_generations": 2, "keep": {"per_group": 3}},
            FieldProblem(
                field="keep.per_group",
                message="a group has only 2 rollouts; keep fewer or raise num_generations",
                value=3,
            ),
        ),
        (
            {"keep": {"groups": 2}},
            FieldProblem(
                field="keep.groups",
                message="there are only 1 groups, one per sample; keep fewer, or draw more",
                value=2,
            ),
        ),
        (
            {"samples": [SAMPLE, {**SAMPLE, "task_name": "go"}]},
            FieldProblem(
                field="samples[1].task_name",
                message="there is no task 'go'; the known ones are chess, math",
                value="go",
            ),
        ),
        (
            {"chat_template_kwargs": {"tools": []}},
            FieldProblem(
                field="chat_template_kwargs.tools", message="the service sets this argument itself; leave it out"
            ),
        ),
        (
            {"samples": [{**SAMPLE, "chat_template_kwargs": {"messages": [], "enable_thinking": False}}]},
            FieldProblem(
                field="samples[0].chat_template_kwargs.messages",
                message="the service sets this argument itself; leave it out",
            ),
        ),
        (
            {"samples": [{**SAMPLE, "status": 1}]},
            FieldProblem(
                field="samples[0].status",
                message="this is a field of the result; give the further field another name",
            ),
        ),
        (logged([], []), FieldProblem(field="samples[0].message_log", message="it has no token; send at least one")),
        (
            logged([1], [7, 300, 262]),
            FieldProblem(
                field="samples[0].message_log[1].token_ids[1]",
                message="300 is not a token of the model; its ids are 0 to 261",
                value=300,
            ),
        ),
    ],
)
def test_a_problem_names_its_field_its_value_and_what_to_do(request_: dict[str, Any], expected: FieldProblem) -> None:
    assert problems(request_) == [expected]


def test_all_problems_are_found_at_once() -> None:
    request = {
        "samples": [{**SAMPLE, "task_name": "go"}, {**SAMPLE, "reward": 1, "status": 2}],
        "max_seq_len": 200,
        "keep": {"groups": 3, "per_group": 2},
    }
    assert [problem.field for problem in problems(request)] == [
        "max_seq_len",
        "keep.per_group",
        "keep.groups",
        "samples[0].task_name",
        "samples[1].status",
    ]


# What is included


def included(request: dict[str, Any], **described: Any) -> list[FieldProblem]:
    capabilities = replace(CAPABILITIES, generator=GeneratorDescription("tiny", 100, 262, **described))
    return list(request_problems(RolloutRequest.model_validate({"samples": [SAMPLE], **request}), capabilities))


def test_engines_that_have_what_is_included_are_asked_for_it() -> None:
    request = {
        "include": ["routed_experts", "top_logprobs:64", "sampling_mask", "entropy"],
        "sampling": {"top_k": 32},
    }
    assert included(request, max_logprobs=64, returns_experts=True) == []
    assert included({"include": ["top_logprobs:100000", "entropy"], "sampling": {"top_k": 99999}}) == []


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            {"include": ["routed_experts"]},
            "the engines do not return the experts of tokens; serve a mixture of experts with "
            "enable_return_routed_experts: true under engine",
        ),
        (
            {"include": ["top_logprobs:65"]},
            "the engines name at most 64 tokens; ask for fewer, or raise max_logprobs under engine",
        ),
        (
            {"include": ["entropy"]},
            "it needs sampling.top_k from 1 to 32: without a bound all tokens of the vocabulary could be sampled",
        ),
        (
            {"include": ["sampling_mask"], "sampling": {"top_k": 33}},
            "it needs sampling.top_k from 1 to 32: without a bound all tokens of the vocabulary could be sampled",
        ),
        (
            {"include": ["sampling_mask"], "sampling": {"top_k": 5, "greedy": True}},
            "greedy decoding draws from no distribution; leave it out, or set sampling.temperature",
        ),
        (
            {"include": ["entropy"], "sampling": {"top_k": 5, "temperature": 0}},
            "greedy decoding draws from no distribution; leave it out, or set sampling.temperature",
        ),
    ],
)
def test_what_the_engines_or_the_sampling_do_not_have_is_refused(request_: dict[str, Any], message: str) -> None:
    [name] = request_["include"]
    assert included(request_, max_logprobs=64) == [FieldProblem(field="include[0]", message=message, value=name)]


@pytest.mark.parametrize("include", ["experts", "top_logprobs", "top_logprobs:0", "top_logprobs:x", "Entropy", ""])
def test_a_name_that_is_not_known_is_refused_with_those_that_are(include: str) -> None:
    with pytest.raises(ValueError, match="'routed_experts', 'sampling_mask', 'entropy' or 'top_logprobs:N'"):
        RolloutRequest.model_validate({"samples": [SAMPLE], "include": [include]})


def test_each_kind_is_included_once() -> None:
    with pytest.raises(ValueError, match="top_logprobs is named 2 times: name it once"):
        RolloutRequest.model_validate({"samples": [SAMPLE], "include": ["top_logprobs:2", "top_logprobs:3"]})


# Columns of a posted log


def column(dtype: str, shape: list[int], data: bytes) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data": base64.b64encode(data).decode()}


def post_columns(**columns: Any) -> RolloutRequest:
    message = {"role": "assistant", "content": "a", "token_ids": [1, 2], "generation_logprobs": [-1.0, -1.0]}
    sample = {"task_name": "math", "message_log": [message | columns]}
    return RolloutRequest.model_validate({"samples": [sample]})


SIZES = column("uint16", [2], b"\x01\0\x02\0")


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
        (
            {"routed_experts": column("uint8", [3, 1, 1], bytes(3))},
            "routed_experts has 3 rows in place of 2: send one for each token",
        ),
        ({"routed_experts": column("uint8", [2, 0, 8], b"")}, r"a row of shape \[0, 8\] has no number"),
        (
            {"routed_experts": column("uint8", [2], bytes(2))},
            r"routed_experts is uint8 of shape \[2\]: send uint16 or uint8 with 3 dimensions",
        ),
        ({"entropy": column("float32", [1], bytes(4))}, "entropy has 1 rows in place of 2: send one for each token"),
        (
            {"entropy": column("int32", [2], bytes(8))},
            r"entropy is int32 of shape \[2\]: send float32 with 1 dimensions",
        ),
        (
            {"sampling_mask": column("int32", [2], bytes(8)), "sampling_mask_sizes": SIZES},
            "sampling_mask has 2 rows in place of 3: send one for each token",
        ),
        (
            {"sampling_mask": column("int32", [2], bytes(8))},
            "sampling_mask needs sampling_mask_sizes for 2 token_ids: send both",
        ),
        ({"sampling_mask_sizes": SIZES}, "sampling_mask_sizes needs a sampling_mask: send both"),
        ({"entropy": column("float32", [2, *[1] * 8], bytes(8))}, "at most 8 items"),
        ({"entropy": column("float32", [2**31], b"")}, "less than 2147483648"),
        ({"entropy": {"dtype": "float32", "shape": [2], "data": "AAAA*"}}, "Only base64 data is allowed"),
    ],
)
def test_columns_that_are_not_those_of_the_tokens_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        post_columns(**columns)
