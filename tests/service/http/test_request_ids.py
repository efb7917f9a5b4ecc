"""Request ids: taken from the caller or made, and the same in header, response, problem and log."""

import json
import logging
import re
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from deployments.failures import EnvironmentLost, GenerationRejected
from tests.service.scripted_http import NDJSON, SAMPLE, ScriptedHttp

MINE = "run 7/step-12 ~"


def post(service: ScriptedHttp, body: Any, **headers: str) -> httpx.Response:
    return service.post({"samples": [SAMPLE], **body}, x_request_id=MINE, **headers)


def test_the_callers_id_is_in_the_header_and_in_the_response() -> None:
    response = post(ScriptedHttp(), {})
    assert (response.headers["x-request-id"], response.json()["request_id"]) == (MINE, MINE)


def test_a_request_without_an_id_gets_a_new_one() -> None:
    service = ScriptedHttp()
    responses = [service.post({"samples": [SAMPLE]}) for _ in range(2)]
    ids = [response.json()["request_id"] for response in responses]
    assert [response.headers["x-request-id"] for response in responses] == ids
    assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in ids)
    assert ids[0] != ids[1]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/rollout", 405),
        ("GET", "/tasks/chess/samples", 404),
        ("GET", "/tasks/math/samples?count=0", 422),
        ("POST", "/rollout", 400),
    ],
)
def test_every_problem_has_the_callers_id(method: str, path: str, status: int) -> None:
    response = ScriptedHttp().request(method, path, headers={"x-request-id": MINE})
    assert (response.status_code, response.headers["content-type"]) == (status, "application/problem+json")
    assert (response.headers["x-request-id"], response.json()["request_id"]) == (MINE, MINE)


def test_a_failed_sample_that_ends_its_request_has_the_callers_id() -> None:
    service = ScriptedHttp()
    service.generator.script = [GenerationRejected("no")]
    whole = post(service, {"on_error": "fail"})
    assert (whole.status_code, whole.json()["request_id"]) == (502, MINE)
    streamed = post(service, {"on_error": "fail"}, accept=NDJSON)
    last = json.loads(streamed.text.splitlines()[-1])["problem"]
    assert (last["status"], last["request_id"], streamed.headers["x-request-id"]) == (502, MINE, MINE)
    assert (streamed.status_code, last["type"]) == (200, "urn:rollout:problem:sample-failed")


@pytest.mark.parametrize("given", ["", "a" * 129, "caf\u00e9", "a\tb"])
def test_an_id_that_is_not_allowed_is_refused_under_a_new_one(given: str) -> None:
    service = ScriptedHttp()
    body = json.dumps({"samples": [SAMPLE]})
    response = service.request("POST", "/rollout", content=body, headers={"x-request-id": given.encode("latin-1")})
    assert (response.status_code, response.headers["content-type"]) == (422, "application/problem+json")
    problem = response.json()
    assert problem["errors"] == [
        {
            "field": "header.X-Request-ID",
            "message": "it must have 1 to 128 characters, all printable ASCII",
            "value": given,
        }
    ]
    assert re.fullmatch("[0-9a-f]{32}", problem["request_id"])
    assert response.headers["x-request-id"] == problem["request_id"]
    assert not service.has_started_something


UNEXPECTED = "ZeroDivisionError: the service's log has the message and the traceback under the request's id"


@pytest.fixture
def broken_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody expects, after the last sample."""

    def fail(_self: Any) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("service.rollouts.metrics.RequestMetricsAccumulator.metrics", fail)


@pytest.mark.usefixtures("broken_metrics")
def test_an_unexpected_error_is_a_problem_and_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    response = post(ScriptedHttp(), {})
    assert (response.status_code, response.headers["content-type"]) == (500, "application/problem+json")
    assert (response.headers["x-request-id"], response.json()["request_id"]) == (MINE, MINE)
    assert response.json()["errors"] == [{"field": "", "message": UNEXPECTED, "value": None}]
    assert_logged(caplog, "rollout_service.routes", logging.ERROR, ZeroDivisionError)


@pytest.mark.usefixtures("broken_metrics")
def test_an_unexpected_error_ends_a_stream_with_its_problem_and_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    sample, problem = [json.loads(line) for line in post(ScriptedHttp(), {}, accept=NDJSON).text.splitlines()]
    assert (sample["position"], sample["sample"]["status"]) == (0, "completed")
    assert (problem["problem"]["status"], problem["problem"]["request_id"]) == (500, MINE)
    assert problem["problem"]["errors"][0]["message"] == UNEXPECTED
    assert_logged(caplog, "rollout_service.routes", logging.ERROR, ZeroDivisionError)


def test_a_rejected_prompt_is_logged_with_its_request_and_sample(caplog: pytest.LogCaptureFixture) -> None:
    long = {"task_name": "math", "messages": [{"role": "user", "content": "x" * 200}], "idx": 31}
    response = post(ScriptedHttp(), {"samples": [SAMPLE, long], "num_generations": 2})
    assert [sample["status"] for sample in response.json()["samples"]] == ["completed"] * 2 + ["error"] * 2
    record = assert_logged(caplog, "rollout_service.requests", logging.WARNING, None)
    assert (record.task_name, record.sample) == ("math", 31)


def test_a_deployment_that_does_not_answer_is_logged_with_the_callers_id(caplog: pytest.LogCaptureFixture) -> None:
    service = ScriptedHttp()
    service.environments["math"].describe = AsyncMock(side_effect=EnvironmentLost("It died."))  # type: ignore[method-assign]
    response = service.request("GET", "/tasks", headers={"x-request-id": MINE})
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert (response.headers["x-request-id"], response.json()["request_id"]) == (MINE, MINE)
    assert_logged(caplog, "rollout_service.routes", logging.WARNING, EnvironmentLost)


def assert_logged(caplog: pytest.LogCaptureFixture, logger: str, level: int, error: type[Exception] | None) -> Any:
    """Exactly one record of `logger`, with the caller's id and a traceback of `error`."""
    [record] = [record for record in caplog.records if record.name == logger]
    assert (record.levelno, getattr(record, "request_id", None)) == (level, MINE)
    assert record.exc_info is not None
    assert error is None or record.exc_info[0] is error
    return record


def test_behind_a_server_that_sets_the_header_the_application_does_not() -> None:
    mine = {"x-request-id": MINE}

    def header(sets_header: bool) -> Any:
        answer = ScriptedHttp(sets_request_id_header=sets_header).request("GET", "/healthz", headers=mine)
        return answer.headers.get("x-request-id")

    assert (header(sets_header=True), header(sets_header=False)) == (MINE, None)
