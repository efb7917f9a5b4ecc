"""Runs of schemathesis: how cases are shared between them, and what of their output is shown."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI

from tests.endurance.fuzz.routes import failures_in, schemathesis_run, shared

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


@pytest.fixture
def url_of_one_route() -> Iterator[str]:
    """A server whose route `open` names the fields of a 422 in its own way."""
    app = FastAPI()

    @app.get("/open", operation_id="open")
    def answer(number: int) -> str:
        return str(number)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.mark.slow
def test_schemathesis_holds_answers_against_the_rules_of_the_service_in_whatever_folder_it_runs(
    url_of_one_route: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    tally = schemathesis_run(url_of_one_route, "open", seed=0, headers={}, cases=range(20))
    assert tally.cases >= 20
    assert any("status 422 without the name of a field" in problem for problem in tally.problems)
