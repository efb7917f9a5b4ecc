"""Problem documents: what each kind of error says."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from rollout_client.contract.base import FieldProblem, Problem
from rollout_client.contract.rollouts import RolloutRequest
from service import problems
from service.http.middlewares import problem_response
from service.problems import shown, validation_problem

HERE = FieldProblem(field="samples", message="there are too many", value=7)


def test_the_document_has_the_id_of_its_request_and_its_own_media_type() -> None:
    problem = problems.invalid_request(HERE).problem
    response = problem_response(problem, "mine", {"Retry-After": "2"})
    assert (response.status_code, response.headers["retry-after"]) == (422, "2")
    assert response.headers["content-type"] == "application/problem+json"
    assert Problem.model_validate_json(bytes(response.body)) == problem.model_copy(update={"request_id": "mine"})
    assert problem.request_id is None


def problem_of(validate: Callable[[], Any]) -> Problem:
    with pytest.raises(ValidationError) as raised:
        validate()
    return validation_problem(raised.value).problem


def test_a_finding_names_its_path_and_its_value() -> None:
    body = {"samples": [{"task_name": "math", "messages": []}], "sampling": {"top_p": 2}, "samplings": {}}
    problem = problem_of(lambda: RolloutRequest.model_validate(body))
    assert problem.status == 422
    assert [(error.field, error.message, error.value) for error in problem.errors] == [
        ("samples[0].messages", "List should have at least 1 item after validation, not 0", "[]"),
        ("sampling.top_p", "Input should be less than or equal to 1", 2),
        ("samplings", "this field is not known; remove it or check its spelling against /docs", "{}"),
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, 7),
        (None, None),
        (True, True),
        ("x", "x"),
        (1.5, "1.5"),
        ([1], "[1]"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 200 + "..."),
        ([1] * 100, "[" + "1, " * 66 + "1..."),
    ],
)
def test_a_value_is_shown_as_a_scalar_and_cut_when_it_is_long(value: Any, expected: Any) -> None:
    assert shown(value) == expected
    json.dumps(shown(value))
