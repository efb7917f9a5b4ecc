"""Samples that an environment cannot take are refused by name, and one that does not answer refuses nothing."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from deployments.failures import EnvironmentLost
from deployments.protocols.environments import RefusedField
from rollout_client.contract.problems import FieldProblem
from rollout_client.contract.rollouts import RolloutRequest
from service.problems import RequestProblem
from service.rollout_requests.sample_preparation import CHECKED_WITHIN_S, refuse_bad_extra_env_info
from tests import virtual_time
from tests.service.scripted import ScriptedEnvironment

SEE = "; GET /tasks shows the fields of task 'picky' and an example"


class PickyEnvironment(ScriptedEnvironment):
    """Refuses the fields of the samples at some places."""

    def __init__(self, *refused: RefusedField, answers_after_s: float = 0.0, error: Exception | None = None) -> None:
        super().__init__(script=[])
        self.asked: list[list[dict[str, Any]]] = []
        self._refused = refused
        self._answers_after_s = answers_after_s
        self._error = error

    async def refused_fields(self, extra_env_infos: Sequence[dict[str, Any]]) -> list[RefusedField]:
        self.asked.append(list(extra_env_infos))
        await asyncio.sleep(self._answers_after_s)
        if self._error is not None:
            raise self._error
        return list(self._refused)


def request_of(*extra_env_infos: dict[str, Any], others: int = 0) -> RolloutRequest:
    messages = [{"role": "user", "content": "Hi"}]
    easy = [{"task_name": "easy", "messages": messages}] * others
    picky = [{"task_name": "picky", "messages": messages, "extra_env_info": info} for info in extra_env_infos]
    return RolloutRequest.model_validate({"samples": [*easy, *picky]})


def problems_of(request: RolloutRequest, picky: PickyEnvironment) -> list[FieldProblem]:
    check = refuse_bad_extra_env_info(request, "request", {"easy": PickyEnvironment(), "picky": picky})
    with pytest.raises(RequestProblem) as refusal:
        virtual_time.run(check)
    problem = refusal.value.problem
    assert problem.status == 422
    return list(problem.errors)


def test_a_refused_field_is_named_by_its_place_in_the_request_with_its_value() -> None:
    picky = PickyEnvironment(RefusedField(1, ("rows", 0), "Input should be a valid integer"))
    problems = problems_of(request_of({"rows": [1]}, {"rows": ["x"]}, others=3), picky)
    assert problems == [
        FieldProblem(
            field="samples[4].extra_env_info.rows[0]", message=f"Input should be a valid integer{SEE}", value="x"
        )
    ]
    assert picky.asked == [[{"rows": [1]}, {"rows": ["x"]}]]


def test_of_a_missing_field_the_object_around_it_is_shown() -> None:
    problems = problems_of(request_of({"a": {"b": 1}}), PickyEnvironment(RefusedField(0, ("a", "c"), "Field required")))
    assert problems == [
        FieldProblem(field="samples[0].extra_env_info.a.c", message=f"Field required{SEE}", value="{'b': 1}")
    ]


def test_the_whole_of_extra_env_info_can_be_refused() -> None:
    [problem] = problems_of(request_of({}), PickyEnvironment(RefusedField(0, (), "it is no board")))
    assert (problem.field, problem.value) == ("samples[0].extra_env_info", "{}")


def test_what_several_environments_refuse_is_one_answer_of_at_most_20_problems() -> None:
    environments = {
        "easy": PickyEnvironment(*[RefusedField(0, ("a", place), "wrong") for place in range(15)]),
        "picky": PickyEnvironment(*[RefusedField(0, ("b", place), "wrong") for place in range(15)]),
    }
    request = request_of({"b": [0] * 15}, others=1)
    request.samples[0].extra_env_info = {"a": [0] * 15}
    with pytest.raises(RequestProblem) as refusal:
        virtual_time.run(refuse_bad_extra_env_info(request, "request", environments))
    assert [problem.field for problem in refusal.value.problem.errors] == [
        *(f"samples[0].extra_env_info.a[{place}]" for place in range(15)),
        *(f"samples[1].extra_env_info.b[{place}]" for place in range(5)),
    ]


def test_a_long_value_is_shortened() -> None:
    [problem] = problems_of(request_of({"a": "x" * 10_000}), PickyEnvironment(RefusedField(0, ("a",), "too long")))
    assert problem.value == f"{'x' * 200}..."


@pytest.mark.parametrize(
    ("picky", "why"),
    [
        (PickyEnvironment(error=EnvironmentLost("The replica died.")), "The replica died."),
        (
            PickyEnvironment(answers_after_s=3600),
            f"The check of the samples by task 'picky' took longer than {CHECKED_WITHIN_S:g} s.",
        ),
    ],
)
def test_an_environment_that_does_not_answer_refuses_nothing_and_is_logged(
    picky: PickyEnvironment, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    virtual_time.run(refuse_bad_extra_env_info(request_of({}), "request", {"picky": picky}))
    [record] = caplog.records
    assert record.getMessage() == f"The samples of a request were not checked: {why}"
    assert (vars(record)["request_id"], vars(record)["task_name"]) == ("request", "picky")
