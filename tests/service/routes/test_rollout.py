"""`POST /rollout`: what is played, and the formats of its responses."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest

from deployments.failures import GenerationRejected
from rollout_client.arrow.schema import ARROW
from rollout_client.calls.arrow_bodies import read_response
from rollout_client.contract.rollouts import RolloutResponse
from service.rollout_requests import result_encoding
from service.rollout_requests.arrow_encoder import ArrowResponseEncoder
from service.rollout_requests.garbage_collection import PacedCollections
from service.rollout_requests.result_encoding import JsonResponseEncoder, sample_line
from service.rollouts.metrics import RequestMetricsAccumulator
from service.settings import RequestLimits
from tests.service.scripted_http import NDJSON, SAMPLE, ScriptedHttp

JSON = "application/json"


# What is played


@pytest.mark.parametrize("name", ["cls", "_fields_set", "self", "model_config", "__class__", ""])
def test_a_further_field_may_have_any_name(name: str) -> None:
    assert ScriptedHttp().post({"samples": [{**SAMPLE, name: [None, "x"]}]}).json()["samples"][0][name] == [None, "x"]


# Formats


def test_the_response_is_json_unless_another_format_is_accepted() -> None:
    service = ScriptedHttp()
    for accept in ("", "*/*", JSON, "text/html"):
        response = service.post({"samples": [SAMPLE]}, accept=accept)
        assert (response.status_code, response.headers["content-type"]) == (200, JSON)
        assert len(RolloutResponse.model_validate_json(response.content).samples) == 1


def test_arrow_is_sent_where_it_is_accepted() -> None:
    response = ScriptedHttp().post({"samples": [SAMPLE]}, accept=f"{ARROW}, */*;q=0.1", x_request_id="mine")
    assert (response.status_code, response.headers["content-type"]) == (200, ARROW)
    read = read_response(response.content)
    assert (read.request_id, [sample.status for sample in read.samples]) == ("mine", ["completed"])


def test_a_stream_has_a_line_per_rollout_as_it_ends_and_then_the_summary() -> None:
    service = ScriptedHttp()
    service.generator.script = [GenerationRejected("no"), "A"]
    response = service.post({"samples": [SAMPLE, SAMPLE], "num_generations": 2}, accept=NDJSON, x_request_id="mine")
    assert (response.status_code, response.headers["content-type"]) == (200, NDJSON)
    *samples, summary = [json.loads(line) for line in response.text.splitlines()]
    places = [(line["position"], line["sample"]["idx"], line["sample"]["generation_index"]) for line in samples]
    assert sorted(places) == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert {*map(tuple, samples)} == {("position", "sample")}
    assert (list(summary), summary["summary"]["request_id"]) == (["summary"], "mine")
    assert summary["summary"]["metrics"]["total_turns"] == 2


@pytest.mark.parametrize(("length", "is_inline"), [(10, True), (11, False)])
@pytest.mark.parametrize(
    ("accept", "encoder"), [(JSON, JsonResponseEncoder), (ARROW, ArrowResponseEncoder), (NDJSON, None)]
)
def test_a_rollout_of_many_tokens_is_encoded_in_another_thread(
    accept: str, encoder: Any, length: int, is_inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noted(encode: Any) -> Any:
        def noting(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return encode(*arguments)

        return noting

    if encoder is None:
        monkeypatch.setattr("service.rollout_requests.running_rollout.sample_line", noted(sample_line))
    else:
        monkeypatch.setattr(encoder, "add", noted(encoder.add))
    monkeypatch.setattr(result_encoding, "MOST_TOKENS_INLINE", 10)
    monkeypatch.setattr(result_encoding, "BYTES_PER_TOKEN", 10**6)
    service = ScriptedHttp()
    service.generator.script = ["A" * 6]
    log = [{"role": "user", "content": "a", "token_ids": [64] * (length - 6)}]
    assert service.post({"samples": [{"task_name": "math", "message_log": log}]}, accept=accept).status_code == 200
    assert [thread == threading.get_ident() for thread in threads] == [is_inline]


@pytest.mark.parametrize("accept", [JSON, ARROW])
def test_a_large_response_is_the_same_made_in_parts_in_threads(accept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_encoding, "PART_BYTES", 100)
    monkeypatch.setattr("service.rollout_requests.arrow_encoder.NUMBERS_PER_BATCH", 40)
    monkeypatch.setattr("service.rollout_requests.episodes.uuid4", lambda: UUID(int=7))
    body = {"samples": [SAMPLE] * 3, "num_generations": 2}
    at_once = ScriptedHttp().post(body, accept=accept, x_request_id="mine")
    monkeypatch.setattr(result_encoding, "MOST_TOKENS_INLINE", 10)
    streamed = ScriptedHttp().post(body, accept=accept, x_request_id="mine")
    assert ["content-length" in answer.headers for answer in (at_once, streamed)] == [True, False]
    assert streamed.content == at_once.content
    assert (streamed.status_code, streamed.headers["content-type"]) == (200, accept)


def test_an_error_while_the_first_part_is_made_is_still_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: Any, _summary: Any) -> Iterator[bytes]:
        yield bytes(1 // 0)

    monkeypatch.setattr(JsonResponseEncoder, "body", fail)
    for bound in (10_000, 1):
        monkeypatch.setattr(result_encoding, "MOST_TOKENS_INLINE", bound)
        response = ScriptedHttp(RequestLimits()).post({"samples": [SAMPLE]})
        assert (response.status_code, response.headers["content-type"]) == (500, "application/problem+json")


@pytest.mark.parametrize("accept", [JSON, NDJSON, ARROW])
def test_the_collector_has_a_request_in_flight_until_its_answer(accept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight: list[bool] = []

    @contextmanager
    def request_in_flight(_: PacedCollections) -> Iterator[None]:
        in_flight.append(True)
        yield
        in_flight.append(False)

    def metrics(_: RequestMetricsAccumulator) -> dict[str, Any]:
        # Computed after the last rollout.
        in_flight.append(in_flight[-1])
        return {}

    monkeypatch.setattr(PacedCollections, "request_in_flight", request_in_flight)
    monkeypatch.setattr(RequestMetricsAccumulator, "metrics", metrics)
    assert ScriptedHttp().post({"samples": [SAMPLE]}, accept=accept).status_code == 200
    assert in_flight == [True, True, False]
