"""What every answer of the service must be like."""

import json

from tests.endurance.fuzz.answers import answer_problems


def problem(status: int, name: str = "invalid-request", **fields: object) -> tuple[int, bytes]:
    return status, json.dumps({"type": f"urn:rollout:problem:{name}", "status": status, **fields}).encode()


def test_a_right_answer_and_a_refusal_that_names_its_field_break_no_rule() -> None:
    named = [{"field": "samples[0].task_name", "message": "there is no such task"}]
    assert list(answer_problems(200, b'{"samples": []}')) == []
    assert list(answer_problems(*problem(422, errors=named))) == []


def test_a_422_that_names_no_field_is_found() -> None:
    for errors in ([], [{"field": "", "message": "wrong"}], None):
        [found] = answer_problems(*problem(422, errors=errors))
        assert found.startswith("status 422 without the name of a field")


def test_a_5xx_is_found_unless_it_is_the_foreseen_problem_of_its_status() -> None:
    assert list(answer_problems(*problem(503, "not-ready"))) == []
    assert list(answer_problems(*problem(502, "sample-failed"))) == []
    assert list(answer_problems(*problem(501, "sessions-not-configured"))) == []
    for status, body in (
        problem(500, "internal"),
        problem(501, "not-ready"),
        problem(503, "internal"),
        (502, b"Bad Gateway"),
    ):
        assert len(list(answer_problems(status, body))) == 1


def test_tracebacks_and_paths_of_the_server_are_found_but_not_those_that_were_sent() -> None:
    for leak in (
        "Traceback (most recent call last):",
        'File "service/app.py", line 7, in build',
        "cannot read /home/rollout/models/x",
        "/usr/lib/python3.11",
    ):
        assert len(list(answer_problems(200, json.dumps({"message": leak}).encode()))) == 1
    assert list(answer_problems(200, b'{"checkpoint": "/home/me/step"}', sent=b'{"checkpoint": "/home/me/step"}')) == []
    assert list(answer_problems(200, b'{"next": "/v1/rollout", "docs": "/docs"}')) == []
