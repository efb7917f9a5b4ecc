"""What a response counts for, by what it holds and how it failed."""

import json

import pytest

from rollout_client import RolloutError, ServiceUnreachable, StreamBroken, UploadLost
from rollout_load.outcomes import LoadOutcome, kind_of, outcome_of_call, outcome_of_error, outcome_of_response
from tests.clients.scripted_service import REJECTED, SUMMARY, Json, result


def answered(*samples: Json, expected: int | None = None) -> LoadOutcome:
    body = json.dumps({**SUMMARY, "samples": samples}).encode()
    return outcome_of_response(200, {}, body, len(samples) if expected is None else expected)


def failed(kind: str) -> Json:
    error = {"kind": kind, "message": f"The {kind} broke.", "retryable": True}
    return result(status="error", error=error, total_reward=None)


def test_rollouts_count_with_their_turns_tokens_and_statuses() -> None:
    outcome = answered(result(), result(1, status="max_turns"))
    assert (outcome.rollouts, outcome.turns, outcome.tokens) == (2, 2, 4)
    assert outcome.statuses == {"completed": 1, "max_turns": 1}
    assert outcome.failure is None


def test_failed_rollouts_are_errors_by_their_kinds() -> None:
    outcome = answered(result(), failed("generation"), failed("environment"), failed("generation"))
    assert outcome.rollouts == 1
    assert outcome.errors == {"generation": 2, "environment": 1}
    assert (outcome.failure, outcome.message) == ("environment, generation", "The generation broke.")


def test_rollouts_that_are_missing_are_an_answer_that_is_not_understood() -> None:
    outcome = answered(result(), expected=3)
    assert outcome.errors == {"not-understood": 1}
    assert outcome.message == "The answer has 1 rollouts instead of 3."


@pytest.mark.parametrize("body", [b"no JSON", b"{}", b'{"samples": [{}]}'])
def test_another_answer_is_not_understood(body: bytes) -> None:
    assert outcome_of_response(200, {}, body, 1).failure == "not-understood"


def test_a_problem_is_an_error_by_the_name_of_its_type() -> None:
    assert outcome_of_response(422, {}, json.dumps(REJECTED).encode(), 1).failure == "invalid-request"


def test_a_service_that_is_full_says_when_to_come_back() -> None:
    full = {"type": "urn:rollout:problem:overloaded", "title": "Full", "status": 429, "detail": ""}
    outcome = outcome_of_response(429, {"retry-after": "7"}, json.dumps(full).encode(), 1)
    assert (outcome.failure, outcome.retry_after_s) == ("overloaded", 7.0)


def test_a_status_without_a_problem_and_no_answer_at_all_have_kinds_too() -> None:
    assert outcome_of_response(502, {}, b"<html>", 1).failure == "status-502"
    assert outcome_of_response(0, {}, b"", 1).failure == "unreachable"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ServiceUnreachable("gone"), "unreachable"),
        (StreamBroken("cut"), "stream-broken"),
        (UploadLost("l"), "upload-lost"),
    ],
)
def test_errors_of_the_client_have_kinds(error: RolloutError, kind: str) -> None:
    assert kind_of(error) == kind


def test_a_stream_that_breaks_keeps_what_had_arrived() -> None:
    outcome = outcome_of_error(StreamBroken("cut"), LoadOutcome(rollouts=2, tokens=8))
    assert (outcome.rollouts, outcome.tokens, outcome.failure) == (2, 8, "stream-broken")


def test_a_call_of_the_engine_is_a_turn_and_an_ended_session_a_rollout() -> None:
    call, answer = outcome_of_call(200, {}, b'{"usage": {"completion_tokens": 9}, "choices": []}')
    assert (call.turns, call.tokens, call.rollouts) == (1, 9, 0)
    assert answer == {"usage": {"completion_tokens": 9}, "choices": []}
    ended, _ = outcome_of_call(200, {}, b'{"status": "ended"}')
    assert (ended.turns, ended.rollouts, ended.statuses) == (0, 1, {"ended": 1})


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (0, b"", "unreachable"),
        (400, b"{}", "status-400"),
        (200, b"none", "not-understood"),
        (200, b"[]", "not-understood"),
    ],
)
def test_a_call_that_fails_has_no_answer(status: int, content: bytes, kind: str) -> None:
    outcome, answer = outcome_of_call(status, {}, content)
    assert (outcome.failure, answer) == (kind, None)
