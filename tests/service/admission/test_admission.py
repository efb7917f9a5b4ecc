"""Which requests are admitted, and what a refusal says."""

from typing import Any

import pytest

from rollout_client.contract import RolloutRequest
from service.admission.admission import Admission
from service.admission.capacity import Amounts
from service.responses.problems import RequestProblem
from service.settings import AdmissionBounds, AdmissionSettings, Limits

SAMPLE = {"task_name": "math", "messages": [{"role": "user", "content": "Hi"}]}
MAX_MODEL_LEN = 1000


def request_of(samples: int = 1, **fields: Any) -> RolloutRequest:
    return RolloutRequest.model_validate({"samples": [SAMPLE] * samples, **fields})


def admission(**bounds: int) -> Admission:
    settings = AdmissionSettings(replica=AdmissionBounds(**bounds), service=AdmissionBounds())
    return Admission(settings, MAX_MODEL_LEN)


def refusal(problem: RequestProblem) -> tuple[int, str, str]:
    [error] = problem.problem.errors
    return problem.problem.status, error.field, error.message


@pytest.mark.parametrize(
    ("request_", "tokens_a_rollout"),
    [
        (request_of(), MAX_MODEL_LEN),
        (request_of(max_seq_len=70), 70),
        (request_of(sampling={"max_new_tokens": 10}), 160),
        (request_of(sampling={"max_new_tokens": 10}, max_rollout_turns=2), 20),
        (request_of(sampling={"max_new_tokens": 10}, max_rollout_turns=2, max_seq_len=15), 15),
        (request_of(sampling={"max_new_tokens": 900}), MAX_MODEL_LEN),
    ],
)
def test_a_rollout_counts_with_the_most_tokens_that_its_request_allows(
    request_: RolloutRequest, tokens_a_rollout: int
) -> None:
    assert admission().amounts_of(request_) == Amounts(rollouts=1, tokens=tokens_a_rollout)


def test_an_admitted_request_holds_its_body_and_its_rollouts_until_it_ends() -> None:
    admission_ = admission()
    with admission_.admitted(100) as admitted:
        assert admission_.in_flight == Amounts(1, 1, 100)
        admitted.hold_body(150)
        admitted.hold_body(120)
        admitted.hold_rollouts(request_of(3, num_generations=2))
        assert admission_.in_flight == Amounts(6, 6 * MAX_MODEL_LEN, 150)
    assert admission_.in_flight == Amounts()


def test_a_request_that_fails_holds_nothing_afterwards() -> None:
    admission_ = admission()

    def play() -> None:
        with admission_.admitted(100) as admitted:
            admitted.hold_rollouts(request_of())
            raise KeyError

    with pytest.raises(KeyError):
        play()
    assert admission_.in_flight == Amounts()


def test_a_full_replica_refuses_a_request_by_its_headers() -> None:
    admission_ = admission(max_rollouts=4)
    with admission_.admitted(0) as admitted:
        admitted.hold_rollouts(request_of(4))
        with pytest.raises(RequestProblem) as raised, admission_.admitted(0):
            pass
    retry_after_s = raised.value.headers["Retry-After"]
    assert retry_after_s in ("5", "6", "7")
    assert raised.value.problem.type == "urn:rollout:problem:overloaded"
    assert refusal(raised.value) == (
        429,
        "",
        f"4 rollouts are in flight here and admission.replica.max_rollouts allows 4; try again in {retry_after_s} s",
    )


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"max_rollouts": 6}, "6 rollouts are in flight here and admission.replica.max_rollouts allows 6"),
        ({"max_tokens": 6500}, "5001 requested tokens are in flight here and admission.replica.max_tokens allows 6500"),
    ],
)
def test_a_request_is_refused_when_its_rollouts_are_known(bounds: dict[str, int], message: str) -> None:
    admission_ = admission(**bounds)
    with admission_.admitted(0) as first, admission_.admitted(0) as second:
        first.hold_rollouts(request_of(5))
        with pytest.raises(RequestProblem) as raised:
            second.hold_rollouts(request_of(2))
    status, _, said = refusal(raised.value)
    assert (status, said.partition(";")[0]) == (429, message)


def test_a_body_is_refused_while_it_is_read_and_by_the_size_in_its_headers() -> None:
    admission_ = admission(max_body_bytes=100)
    expected = "90 bytes of bodies are in flight here and admission.replica.max_body_bytes allows 100"
    with admission_.admitted(80), admission_.admitted(10) as second:
        with pytest.raises(RequestProblem) as growing:
            second.hold_body(21)
        with pytest.raises(RequestProblem) as coming, admission_.admitted(11):
            pass
    for raised in (growing, coming):
        status, _, said = refusal(raised.value)
        assert (status, said.partition(";")[0]) == (429, expected)


@pytest.mark.parametrize(
    ("bounds", "request_", "field", "message"),
    [
        (
            {"max_rollouts": 5},
            request_of(6),
            "samples",
            "6 rollouts are more than admission.replica.max_rollouts allows, which is 5; split the request",
        ),
        (
            {"max_tokens": 5000},
            request_of(6),
            "max_seq_len",
            "6000 requested tokens are more than admission.replica.max_tokens allows, which is 5000; "
            "split the request, or lower max_seq_len or sampling.max_new_tokens",
        ),
    ],
)
def test_rollouts_that_can_never_be_admitted_are_not_valid(
    bounds: dict[str, int], request_: RolloutRequest, field: str, message: str
) -> None:
    with admission(**bounds).admitted(0) as admitted, pytest.raises(RequestProblem) as raised:
        admitted.hold_rollouts(request_)
    assert refusal(raised.value) == (422, field, message)


def test_a_body_that_can_never_be_admitted_is_too_large() -> None:
    with pytest.raises(RequestProblem) as raised, admission(max_body_bytes=100).admitted(101):
        pass
    assert refusal(raised.value) == (
        413,
        "body",
        "101 bytes of bodies are more than admission.replica.max_body_bytes allows, which is 100; split the request",
    )


def test_a_bound_of_the_service_is_shared_by_the_ingress_replicas() -> None:
    settings = AdmissionSettings(service=AdmissionBounds(max_rollouts=10))
    admission_ = Admission(settings, MAX_MODEL_LEN, ingress_replicas=lambda: 3)
    with admission_.admitted(0) as first, admission_.admitted(0) as second:
        first.hold_rollouts(request_of(3))
        with pytest.raises(RequestProblem) as raised:
            second.hold_rollouts(request_of(2))
    assert refusal(raised.value)[2].startswith(
        "4 rollouts are in flight here and admission.service.max_rollouts allows 4;"
    )


def test_the_default_bounds_admit_the_largest_request_that_the_default_limits_allow_twice() -> None:
    limits, bounds = Limits(), AdmissionSettings().replica
    assert bounds.max_rollouts == 2 * limits.max_rollouts_per_request
    assert bounds.max_body_bytes == 2 * limits.max_body_bytes
    assert bounds.max_tokens == limits.max_rollouts_per_request * 32_768
