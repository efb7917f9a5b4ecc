"""Outcomes of responses, and their totals: counted, sent by workers, summed by the master."""

import json
from collections import Counter

import msgpack
import pytest

from rollout_client import RolloutError, ServiceUnreachable, StreamBroken, UploadLost
from rollout_load.outcomes import (
    SLOT_S,
    LoadOutcome,
    LoadTotals,
    kind_of,
    outcome_of_call,
    outcome_of_error,
    outcome_of_response,
)
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


def two_rollouts(tokens: int = 10) -> LoadOutcome:
    return LoadOutcome(2, 3, tokens, Counter({"completed": 2}), Counter({"generation": 1}))


def test_outcomes_add_up() -> None:
    totals = LoadTotals()
    totals.add(two_rollouts(), 100.0)
    totals.add(two_rollouts(), 104.9)
    totals.add(two_rollouts(), 105.0)
    assert (totals.rollouts, totals.turns, totals.tokens) == (6, 9, 30)
    assert (totals.statuses, totals.errors) == ({"completed": 6}, {"generation": 3})
    assert totals.slots == {20: 20, 21: 10}


def test_what_workers_send_adds_up_at_the_master() -> None:
    worker, other = LoadTotals(pushes=1), LoadTotals()
    worker.add(two_rollouts(), 100.0)
    other.add(two_rollouts(5), 100.0)
    master = LoadTotals()
    for each in (worker, other):
        # As locust's connection carries it.
        master.merge(LoadTotals.of_message(msgpack.loads(msgpack.dumps(each.message()))))
    assert (master.rollouts, master.turns, master.tokens, master.pushes) == (4, 6, 15, 1)
    assert (master.statuses, master.errors, master.slots) == ({"completed": 4}, {"generation": 2}, {20: 15})


def test_cleared_totals_are_new_ones() -> None:
    totals = LoadTotals(pushes=1)
    totals.add(two_rollouts(), 100.0)
    totals.clear()
    assert totals == LoadTotals()


@pytest.mark.parametrize(
    ("tokens", "held"),
    [
        ([], None),
        ([7, 10, 10, 7], None),
        ([7, 10, 10, 10, 8, 7], 0.8),
        ([7, 10, 30, 5, 5, 5, 5, 10, 10, 7], 0.5),
        # A quarter without an answer is one without tokens, not one that is not there.
        ([7, 10, 10, 10, 0, 7], 0.0),
    ],
)
def test_a_soak_compares_its_last_quarter_with_the_first_without_the_cut_slots(
    tokens: list[int], held: float | None
) -> None:
    totals = LoadTotals()
    for slot, count in enumerate(tokens):
        if count:
            totals.add(two_rollouts(count), slot * SLOT_S)
    assert totals.last_quarter_over_first() == held
