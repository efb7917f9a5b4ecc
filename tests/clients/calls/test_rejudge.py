"""`Rejudging`, which decides what is posted: how it takes the refusals of the service."""

import numpy as np
import pytest
import torch

from rollout_client import RequestRejected, SampleResult
from rollout_client.calls.rejudge import Rejudging
from rollout_client.contract.base import FieldProblem, Problem
from tests.clients.scripted_service import result

PROGRAM = "a program plays this task, and cannot go on with a log; post the sample's messages in its place"


def refused(*problems: tuple[str, str]) -> RequestRejected:
    errors = [FieldProblem(field=field, message=message) for field, message in problems]
    return RequestRejected(Problem(type="about:blank", title="Not valid", status=422, detail="", errors=errors))


def rejudging(count: int, knows_samples: bool = False) -> Rejudging:
    rollouts = [SampleResult.model_validate(result(place)) for place in range(count)]
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    samples = [
        {"task_name": "math", "messages": messages, "extra_env_info": {"place": place}} for place in range(count)
    ]
    return Rejudging(rollouts, None, samples if knows_samples else None, {"math": {"ground_truth": "0"}})


def test_the_samples_of_a_task_that_a_program_plays_are_refused_with_one_request() -> None:
    judging = rejudging(3)
    assert judging.next_request() is not None
    judging.refuse(refused(("samples[0].message_log", PROGRAM)))
    assert judging.next_request() is None
    assert judging.result().not_judged == {PROGRAM: 3}


def test_a_log_of_another_model_is_refused_alone() -> None:
    judging = rejudging(2)
    posted = judging.next_request()
    assert posted is not None
    assert posted[0][0]["extra_env_info"] == {"ground_truth": "0"}
    judging.refuse(refused(("samples[0].message_log[1].token_ids[0]", "999 is not a token of the model")))
    again = judging.next_request()
    assert again is not None
    assert (again[0][0]["extra_env_info"], again[1]) == ({"ground_truth": "0"}, 1)
    judging.add([SampleResult.model_validate(result(extra_env_info={"ground_truth": "0"}))])
    judged = judging.next_request()
    assert judged is not None
    assert [sample["extra_env_info"] for sample in judged[0]] == [{"ground_truth": "2"}]
    judging.add([SampleResult.model_validate(result())])
    found = judging.result()
    assert [rollout.new for rollout in found.rollouts] == [None, 1.0]
    assert found.not_judged == {"message_log[1].token_ids[0]: 999 is not a token of the model": 1}


def test_each_rollout_that_is_refused_has_the_reason_of_its_own_sample() -> None:
    judging = rejudging(3, knows_samples=True)
    posted = judging.next_request()
    assert posted is not None
    assert [sample["extra_env_info"] for sample in posted[0]] == [{"place": 0}, {"place": 1}, {"place": 2}]
    judging.refuse(refused(("samples[0].extra_env_info.place", "Too low"), ("samples[2]", "Too much")))
    left = judging.next_request()
    assert left is not None
    assert [sample["extra_env_info"] for sample in left[0]] == [{"place": 1}]
    judging.add([SampleResult.model_validate(result())])
    assert [rollout.reason for rollout in judging.result().rollouts] == [
        "extra_env_info.place: Too low",
        None,
        "Too much",
    ]


@pytest.mark.parametrize("field", ["samples[0].task_name", "policy.version"])
def test_a_refusal_that_is_not_about_rollouts_is_raised(field: str) -> None:
    judging = rejudging(1)
    judging.next_request()
    with pytest.raises(RequestRejected):
        judging.refuse(refused((field, "It is not there")))


def test_numbers_of_numpy_and_torch_in_the_given_samples_are_those_that_were_played() -> None:
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    info = {"grid": np.eye(2, dtype=int), "n": torch.tensor(3)}
    sample = {"task_name": "math", "messages": messages, "extra_env_info": info, "idx": torch.tensor(0)}
    judging = Rejudging([SampleResult.model_validate(result())], None, [sample], {})
    posted = judging.next_request()
    assert posted is not None
    assert posted[0][0]["extra_env_info"] == {"grid": [[1, 0], [0, 1]], "n": 3}
