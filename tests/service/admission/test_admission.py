"""Which requests are admitted, and what a refusal says."""

import asyncio
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.contract.rollouts import RolloutRequest
from service.access.keys import Caller
from service.admission.admission import Admission
from service.admission.capacity import Amounts
from service.problems import RequestProblem
from service.settings import AdmissionSettings
from tests import virtual_time

SAMPLE = {"task_name": "math", "messages": [{"role": "user", "content": "Hi"}]}
MAX_MODEL_LEN = 1000


def request_of(samples: int = 1, **fields: Any) -> RolloutRequest:
    return RolloutRequest.model_validate({"samples": [SAMPLE] * samples, **fields})


def admission(**bounds: int) -> Admission:
    return Admission(AdmissionSettings(**bounds), MAX_MODEL_LEN)


def refusal(raised: pytest.ExceptionInfo[RequestProblem]) -> tuple[int, str, str]:
    [error] = raised.value.problem.errors
    return raised.value.problem.status, error.field, error.message


def refused_now(raised: pytest.ExceptionInfo[RequestProblem]) -> tuple[str, str]:
    """The kind of a refusal that another time may not be one, and what it says before when to try again."""
    status, _, message = refusal(raised)
    assert (status, int(raised.value.headers["Retry-After"]) >= 1) == (429, True)
    return raised.value.problem.type.removeprefix("urn:rollout:problem:"), message.partition(";")[0]


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
def test_a_rollout_counts_with_the_most_tokens_it_may_make(request_: RolloutRequest, tokens_a_rollout: int) -> None:
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


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"max_rollouts": 6}, "6 rollouts are in flight here and admission.max_rollouts allows 6"),
        ({"max_tokens": 6500}, "5001 requested tokens are in flight here and admission.max_tokens allows 6500"),
    ],
)
def test_a_request_is_refused_when_its_rollouts_are_known(bounds: dict[str, int], message: str) -> None:
    admission_ = admission(**bounds)
    with admission_.admitted(0) as first, admission_.admitted(0) as second:
        first.hold_rollouts(request_of(5))
        with pytest.raises(RequestProblem) as raised:
            second.hold_rollouts(request_of(2))
    assert refused_now(raised) == ("overloaded", message)


def test_a_body_is_refused_while_it_is_read_and_by_the_size_in_its_headers() -> None:
    admission_ = admission(max_body_bytes=100)
    with admission_.admitted(80), admission_.admitted(10) as second:
        with pytest.raises(RequestProblem) as growing:
            second.hold_body(21)
        with pytest.raises(RequestProblem) as coming, admission_.admitted(11):
            pass
    message = "90 bytes of bodies are in flight here and admission.max_body_bytes allows 100"
    assert refused_now(growing) == refused_now(coming) == ("overloaded", message)


@pytest.mark.parametrize(
    ("bounds", "field", "says"),
    [
        ({"max_rollouts": 5}, "samples", "6 rollouts are more than admission.max_rollouts allows, which is 5;"),
        ({"max_tokens": 5000}, "max_seq_len", "6000 requested tokens are more than admission.max_tokens allows,"),
    ],
)
def test_rollouts_that_can_never_be_admitted_are_not_valid(bounds: dict[str, int], field: str, says: str) -> None:
    with admission(**bounds).admitted(0) as admitted, pytest.raises(RequestProblem) as raised:
        admitted.hold_rollouts(request_of(6))
    status, named, message = refusal(raised)
    assert (status, named, message.startswith(says)) == (422, field, True)


def test_a_body_that_can_never_be_admitted_is_too_large() -> None:
    with pytest.raises(RequestProblem) as raised, admission(max_body_bytes=100).admitted(101):
        pass
    message = "101 bytes of bodies are more than admission.max_body_bytes allows, which is 100; split the request"
    assert refusal(raised) == (413, "body", message)


def with_quota(name: str = "team", max_rollouts: int | None = None) -> Caller:
    return Caller(name, frozenset({"rollout"}), max_rollouts=max_rollouts)


def test_a_key_holds_no_more_rollouts_than_its_quota() -> None:
    admission_ = admission()
    mine = with_quota(max_rollouts=4)
    with admission_.admitted(0, mine) as first:
        first.hold_rollouts(request_of(3))
        with pytest.raises(RequestProblem) as raised, admission_.admitted(0, mine) as second:
            second.hold_rollouts(request_of(2))
        message = "4 rollouts are in flight here and max_rollouts of the key team allows 4"
        assert refused_now(raised) == ("quota-exceeded", message)
        assert admission_.in_flight.rollouts == 3
        with admission_.admitted(0, with_quota("other", max_rollouts=4)) as other:
            other.hold_rollouts(request_of(4))
    with admission_.admitted(0, mine) as again:
        again.hold_rollouts(request_of(4))


def test_a_full_service_takes_nothing_of_a_keys_quota() -> None:
    admission_, mine = admission(max_rollouts=1), with_quota(max_rollouts=1)
    with admission_.admitted(0), pytest.raises(RequestProblem) as raised, admission_.admitted(0, mine):
        pass
    assert refused_now(raised)[0] == "overloaded"
    with admission_.admitted(0, mine):
        pass


def test_a_quota_that_the_keys_file_changes_applies_to_the_next_request() -> None:
    admission_ = admission()
    with admission_.admitted(0, with_quota(max_rollouts=1)):
        with pytest.raises(RequestProblem), admission_.admitted(0, with_quota(max_rollouts=1)):
            pass
        with admission_.admitted(0, with_quota(max_rollouts=2)):
            pass
        with admission_.admitted(0, with_quota()) as unbounded:
            unbounded.hold_rollouts(request_of(1000))


@given(
    quota=st.integers(1, 20),
    replicas=st.integers(1, 5),
    requests=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20)), max_size=12),
)
def test_ingress_replicas_together_give_a_key_no_more_than_its_quota(
    quota: int, replicas: int, requests: list[tuple[int, int]]
) -> None:
    """Each request names an ingress replica and its rollouts."""
    ingresses = [Admission(AdmissionSettings(), MAX_MODEL_LEN, lambda: replicas) for _ in range(replicas)]
    mine = with_quota(max_rollouts=quota)
    with ExitStack() as held:
        for replica, rollouts in requests:
            with suppress(RequestProblem):
                held.enter_context(ingresses[replica % replicas].admitted(0, mine)).hold_rollouts(request_of(rollouts))
        # Below one rollout for each ingress replica the quota could not be shared.
        assert sum(ingress.in_flight.rollouts for ingress in ingresses) <= max(quota, replicas)


def test_an_idle_replica_refuses_a_request_above_its_share_for_good() -> None:
    admission_ = Admission(AdmissionSettings(), MAX_MODEL_LEN, lambda: 4)
    with admission_.admitted(0, with_quota(max_rollouts=8)) as admitted, pytest.raises(RequestProblem) as raised:
        admitted.hold_rollouts(request_of(3))
    quota = "max_rollouts of the key team (8, shared by 4 ingress replicas)"
    message = f"3 rollouts are more than {quota} allows, which is 2; split the request"
    assert refusal(raised) == (422, "samples", message)


async def test_an_admission_that_drains_ends_with_the_last_in_flight() -> None:
    admission_ = Admission(AdmissionSettings(), MAX_MODEL_LEN)
    with admission_.admitted(0):
        draining = asyncio.create_task(admission_.drain(20))
        await asyncio.sleep(3)
        with pytest.raises(RequestProblem) as refused, admission_.admitted(0):
            pytest.fail("it was admitted")
        assert refusal(refused)[0] == 503
        assert refused.value.headers == {"Retry-After": "5"}
        assert not draining.done()
    assert await draining == 0
    assert virtual_time.now() == pytest.approx(3, abs=0.2)


async def test_an_admission_that_drains_says_what_has_not_ended_in_time() -> None:
    admission_ = Admission(AdmissionSettings(), MAX_MODEL_LEN)
    with admission_.admitted(0) as admitted:
        admitted.hold_rollouts(request_of(3))
        assert await admission_.drain(20) == 3
    assert virtual_time.now() == pytest.approx(20, abs=0.2)


def test_what_headers_say_of_a_body_must_have_room_and_takes_none() -> None:
    admission_ = admission(max_body_bytes=100)
    with admission_.admitted(0, stated_bytes=100), admission_.admitted(0, stated_bytes=100) as second:
        assert admission_.in_flight.body_bytes == 0
        second.hold_body(60)
        with pytest.raises(RequestProblem) as now, admission_.admitted(0, stated_bytes=41):
            pass
    with pytest.raises(RequestProblem) as ever, admission_.admitted(0, stated_bytes=101):
        pass
    assert (refusal(now)[0], refusal(ever)[0]) == (429, 413)


def test_the_bodies_of_one_key_leave_room_for_those_of_others() -> None:
    admission_ = admission(max_body_bytes=100)
    with admission_.admitted(0, with_quota()) as first, admission_.admitted(0, with_quota()) as second:
        first.hold_body(30)
        second.hold_body(20)
        with pytest.raises(RequestProblem) as raised:
            second.hold_body(21)
        message = "50 bytes of bodies are in flight here and admission.max_body_bytes (half for one key) allows 50"
        assert refused_now(raised) == ("quota-exceeded", message)
        with admission_.admitted(0, with_quota("other")) as other:
            other.hold_body(50)
    with admission_.admitted(0, with_quota(), stated_bytes=100) as alone:
        alone.hold_body(100)


def test_a_call_of_an_admitted_rollout_counts_with_its_body_alone() -> None:
    admission_ = admission(max_rollouts=2, max_body_bytes=200)
    with admission_.admitted(100) as request:
        request.hold_rollouts(request_of(2))
        with admission_.admitted(50, is_of_rollout=True) as call:
            call.hold_call(128, "n")
            assert admission_.in_flight == Amounts(2, 2 * MAX_MODEL_LEN, 150)
            with pytest.raises(RequestProblem):
                call.hold_body(101)
        asyncio.run(admission_.drain(bound_s=0.0))
        with admission_.admitted(0, is_of_rollout=True):
            assert admission_.in_flight.rollouts == 2
        with pytest.raises(RequestProblem), admission_.admitted(0):
            pass
