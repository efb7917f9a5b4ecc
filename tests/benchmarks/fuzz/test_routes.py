"""What of schemathesis's output is shown."""

from benchmarks.fuzz.routes import failures_in

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


def test_a_failure_is_shown_with_what_was_expected() -> None:
    assert list(failures_in(FAILED)) == [
        "Schema-violating request accepted: Invalid data should have been rejected Expected: 400, 422"
    ]


def test_a_request_without_an_answer_is_shown_so_that_it_can_be_sent_again() -> None:
    assert list(failures_in(BROKEN)) == [
        "Network Error: Read timed out after 30 seconds Reproduce with: curl -X POST http://127.0.0.1/v1/score"
    ]


def test_failures_and_errors_of_one_route_are_both_shown() -> None:
    assert len(list(failures_in(FAILED + BROKEN))) == 2
