"""How many answers a call asks for, read as vLLM will read it."""

import json
from typing import Any

import pytest

from service.model_server.call_bodies import choices_of
from service.problems import RequestProblem


@pytest.mark.parametrize(
    ("body", "choices"),
    [
        (b'{"messages": [], "n": 5}', 5),
        (b'{"n" : "5"}', 5),
        (b'{"n": 5.0}', 5),
        (b'{"\\u006e": 5}', 5),
        (b'{"\\u006E": 5}', 5),
        (b'{"n": 1, "n": 5}', 5),
        (b'{"n": 5, "text": "\\ud800", "x": NaN}', 5),
        ('{"n": 5}'.encode("utf-16"), 5),
        ('{"n": 5}'.encode("utf-32-be"), 5),
        (b"\xef\xbb\xbf" + b'{"n": 5}', 5),
        (b'{"messages": []}', 1),
        (b'{"n": null}', 1),
        (b'{"messages": [{"n": 5}]}', 1),
        # vLLM refuses these.
        (b'{"n": -3}', 1),
        (b'{"n": "many"}', 1),
        (b'{"n": 5', 1),
        (b'["n"]', 1),
        (b'{"n": ' + b"[" * 100_000, 1),
    ],
)
def test_what_n_says_is_read_however_it_is_written(body: bytes, choices: int) -> None:
    assert choices_of("chat/completions", body, most=100) == choices


def test_other_endpoints_answer_once() -> None:
    assert choices_of("messages", b'{"n": 5}', most=100) == 1


@pytest.mark.parametrize("asked", [101, 10**30])
def test_more_than_a_request_may_play_is_refused(asked: Any) -> None:
    with pytest.raises(RequestProblem) as raised:
        choices_of("chat/completions", json.dumps({"n": asked}).encode(), most=100)
    [error] = raised.value.problem.errors
    assert (raised.value.problem.status, error.field, error.value) == (422, "n", asked)
    assert error.message == (
        f"{asked} choices are more than limits.max_rollouts_per_request allows, which is 100; ask for fewer"
    )
