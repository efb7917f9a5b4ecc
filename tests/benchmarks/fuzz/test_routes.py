"""Runs of schemathesis: how cases are shared between them, and what of their output is shown."""

from benchmarks.fuzz.routes import failures_in, shared

FAILED = """=================================== FAILURES ===================================
____________________________________ GET /v1/info ____________________________________
1. Test Case ID: dkLZIB

- Schema-violating request accepted

    Invalid data should have been rejected
    Expected: 400, 422

[200] OK:

    `{}`

Reproduce with:

    curl -X GET http://127.0.0.1/v1/info
"""
BROKEN = """==================================== ERRORS ====================================
________________________________ POST /v1/score ________________________________
Network Error

Read timed out after 30 seconds

Reproduce with:

    curl -X POST http://127.0.0.1/v1/score

Need more help?
    Join our Discord server: https://discord.gg/R9ASRAmHnA

=================================== SUMMARY ====================================
"""


def test_a_failure_is_shown_with_what_was_expected_and_answered() -> None:
    assert list(failures_in(FAILED)) == [
        "Schema-violating request accepted: Invalid data should have been rejected Expected: 400, 422 [200] OK: `{}`"
    ]


def test_a_request_without_an_answer_is_shown_so_that_it_can_be_sent_again() -> None:
    assert list(failures_in(BROKEN)) == [
        "Network Error: Read timed out after 30 seconds Reproduce with: curl -X POST http://127.0.0.1/v1/score"
    ]


def test_failures_and_errors_of_one_route_are_both_shown() -> None:
    assert len(list(failures_in(FAILED + BROKEN))) == 2


def test_cases_are_shared_between_runs_without_one_that_has_none() -> None:
    assert shared(range(1500, 3000), 2) == [range(1500, 2250), range(2250, 3000)]
    assert shared(range(10, 17), 3) == [range(10, 12), range(12, 14), range(14, 17)]
    assert shared(range(5, 6), 4) == [range(5, 6)]
