"""`POST /rollout` bodies become requests by their type, large ones beside the event loop."""

import asyncio
import json

import pytest

from rollout_client.contract.rollouts import RolloutRequest
from service.admission.admission import Admission
from service.problems import RequestProblem
from service.rollout_requests.body_parser import BodyParser, read_rollout_request
from service.rollout_requests.parsing import BodyBounds
from service.settings import AdmissionSettings
from tests.service.http.http_requests import http_request

SAMPLE = {"task_name": "math", "messages": [{"role": "user", "content": "Hi"}]}
BODY = json.dumps({"samples": [SAMPLE]}).encode()
EXPECTED = RolloutRequest.model_validate({"samples": [SAMPLE]})
PARSER = BodyParser(BodyBounds(max_rollouts=100, max_sample_bytes=2**20))
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"


def read(body: bytes, content_type: str | None = None, most_bytes: int = 2**20) -> tuple[RolloutRequest, int]:
    headers = {} if content_type is None else {"content-type": content_type}
    with Admission(AdmissionSettings(), max_model_len=1).admitted(0) as admitted:
        return asyncio.run(read_rollout_request(http_request([body], headers), most_bytes, PARSER, admitted))


@pytest.mark.parametrize("content_type", [None, "", JSON, f"{JSON}; charset=utf-8", "APPLICATION/JSON ", FORM])
def test_json_is_read_under_its_type_without_one_and_under_that_of_curl(content_type: str | None) -> None:
    assert read(BODY, content_type) == (EXPECTED, len(BODY))


@pytest.mark.parametrize("content_type", ["text/plain", f"{JSON}x", "json", "application/vnd.safetensors"])
def test_another_type_is_415_and_names_json(content_type: str) -> None:
    with pytest.raises(RequestProblem) as raised:
        read(BODY, content_type)
    problem = raised.value.problem
    assert (problem.status, problem.errors[0].field) == (415, "content-type")
    assert problem.errors[0].message == f"{content_type!r} is not supported; send {JSON}"


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"{", 400, "body"),
        (b"[]", 422, "body"),
        (b"{}", 422, "body"),
        (BODY.replace(b'"Hi"', b"7"), 422, "samples[0].messages[0].content"),
        (BODY[:-1] + b', "num_generations": "2"}', 422, "num_generations"),
    ],
)
def test_a_body_that_is_not_a_request_is_refused(body: bytes, status: int, field: str) -> None:
    with pytest.raises(RequestProblem) as raised:
        read(body)
    problem = raised.value.problem
    assert (problem.status, [error.field for error in problem.errors]) == (status, [field])


def test_the_bound_is_that_of_the_body() -> None:
    assert read(BODY, most_bytes=len(BODY))[1] == len(BODY)
    with pytest.raises(RequestProblem) as raised:
        read(BODY, most_bytes=len(BODY) - 1)
    assert raised.value.problem.status == 413
