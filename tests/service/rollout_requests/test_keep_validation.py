"""Requests that select groups: those that cannot are refused before anything starts, with field, value and advice."""

from typing import Any

import pytest

from rollout_client.contract.base import FieldProblem
from rollout_client.contract.rollouts import RolloutRequest
from service.rollout_requests.validation import keep_problems
from service.settings import RequestLimits
from tests.service.rollout_requests.test_task_samples import service

SAMPLE: dict[str, Any] = {"task_name": "math", "messages": [{"role": "user", "content": "?"}]}
RANGE = {"task_name": "math", "count": 2}
LARGE = RequestLimits()
VARIED = {"reward_std": {"gt": 0}}


def request_of(keep: dict[str, Any], samples: int = 0, num_generations: Any = 4, **fields: Any) -> RolloutRequest:
    drawn = {"samples": [SAMPLE] * samples} if samples else {"samples_from": [RANGE]}
    return RolloutRequest.model_validate({**drawn, "num_generations": num_generations, "keep": keep, **fields})


def problems(keep: dict[str, Any], **fields: Any) -> list[FieldProblem]:
    return list(keep_problems(request_of(keep, **fields)))


@pytest.mark.parametrize(
    ("keep", "fields"),
    [
        ({"groups": 9, "where": VARIED}, {}),
        ({"groups": 2, "where": VARIED, "draw_at_most": 2}, {}),
        ({"groups": 2, "where": VARIED, "per_group": 2, "draw_at_most": 3}, {"samples": 3}),
        ({"groups": 1, "where": {"reward_mean": {"gt": 0}}}, {"num_generations": 1}),
        ({"groups": 1, "where": {"rewards": {"form": {"mean": {"ge": 1, "le": 1}}}}}, {}),
        ({"groups": 1, "where": {"reward_std": {"le": 0}}}, {"num_generations": 1}),
    ],
)
def test_groups_can_be_selected_of_a_range_without_end_and_of_enough_samples(
    keep: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert problems(keep, **fields) == []


@pytest.mark.parametrize(
    ("keep", "fields", "expected"),
    [
        (
            {"where": VARIED},
            {},
            ("keep.groups", None, "it is missing, and keep.where draws samples until so many groups are kept; send it"),
        ),
        (
            {"groups": 3, "where": VARIED, "draw_at_most": 2},
            {},
            ("keep.groups", 3, "there are only 2 groups, one per sample; keep fewer, or draw more"),
        ),
        (
            {"groups": 3, "where": VARIED},
            {"samples": 2},
            ("keep.groups", 3, "there are only 2 groups, one per sample; keep fewer, or draw more"),
        ),
        (
            {"groups": 1, "where": VARIED},
            {"schedule": "lockstep"},
            (
                "schedule",
                "lockstep",
                "keep.where draws further groups while others play, which have no turns in lockstep; choose async",
            ),
        ),
    ],
)
def test_what_cannot_be_selected_is_refused_with_field_value_and_advice(
    keep: dict[str, Any], fields: dict[str, Any], expected: tuple[str, Any, str]
) -> None:
    [problem] = problems(keep, **fields)
    assert (problem.field, problem.value, problem.message) == expected


def test_a_refused_request_over_a_range_reads_no_sample_and_starts_nothing() -> None:
    http = service()
    keep = {"groups": 3, "where": VARIED, "draw_at_most": 2}
    lost = {**RANGE, "split": "lost"}
    refused = http.post({"samples_from": [lost], "num_generations": 2, "keep": keep})
    assert (refused.status_code, [error["field"] for error in refused.json()["errors"]]) == (422, ["keep.groups"])
    assert not http.has_started_something


def test_many_unknown_conditions_are_one_problem_in_a_large_body() -> None:
    where = {"rewards": {}, "reward_mean": {f"bound{number}": 1 for number in range(100)}}
    body = {"samples": [SAMPLE], "keep": {"groups": 1, "where": where}, "further": "x" * 2**17}
    refused = service(limits=LARGE).post(body)
    [error, *_] = refused.json()["errors"]
    assert (error["field"], error["message"]) == ("keep.where.reward_mean", "it has 100 fields; send at most 64")
