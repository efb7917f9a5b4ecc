"""`POST /score`: what comes back, what is refused, and what a failure of the fleet costs."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.failures import GenerationLost, GenerationRejected
from deployments.protocols.generation import RequestShare, ScoringRequest
from service.rollouts import retries
from service.settings import RequestLimits
from tests.fakes.scoring_generator import Answer, ScoringGenerator
from tests.service import scripted_http
from tests.service.scripted_http import LIMITS, ScriptedHttp


@pytest.fixture(autouse=True)
def no_pause_before_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_BACKOFF_S", 0.0)
    monkeypatch.setattr(retries, "JITTER_S", 0.0)


def scoring(*answers: Answer, limits: RequestLimits = LIMITS) -> tuple[ScriptedHttp, ScoringGenerator]:
    generator = ScoringGenerator([""], answers=list(answers))
    return ScriptedHttp(limits, generator=generator), generator


def post(service: ScriptedHttp, **body: Any) -> httpx.Response:
    return service.request("POST", "/v1/score", content=json.dumps(body), headers={"x-request-id": "r"})


def scored(*answers: Answer, **body: Any) -> dict[str, Any]:
    service, _ = scoring(*answers)
    response = post(service, **body)
    assert response.status_code == 200
    document: dict[str, Any] = response.json()
    return document


def test_each_token_but_the_first_has_its_log_probability() -> None:
    assert scored(sequences=[[5, 6, 7], [8, 9]]) == {
        "request_id": "r",
        "policy": {"oldest": "7", "newest": "7", "current": None},
        "scores": [
            {"logprobs": [None, -6, -7], "weight_version": "7"},
            {"logprobs": [None, -9], "weight_version": "7"},
        ],
    }


def test_tokens_that_mean_an_image_are_refused_by_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    seeing = replace(scripted_http.DESCRIPTION, takes_images=True, image_token_ids=(30, 31))
    monkeypatch.setattr(scripted_http, "DESCRIPTION", seeing)
    service, generator = scoring()
    message = "31 means an image, and text alone is scored; leave out sequences that show images"
    [error] = post(service, sequences=[[5, 6], [5, 31, 7, 31]]).json()["errors"]
    assert (error["field"], error["message"]) == ("sequences[1][1]", message)
    assert generator.requests == []
    assert post(service, sequences=[[5, 6]]).status_code == 200


def test_scores_begin_at_the_asked_position() -> None:
    scores = scored(sequences=[[5, 6, 7], [5, 6, 7], [5, 6, 7]], start=[0, 1, 2])["scores"]
    assert [score["logprobs"] for score in scores] == [[None, -6, -7], [-6, -7], [-7]]


def test_the_most_likely_tokens_come_back_if_they_are_asked_for() -> None:
    [score] = scored(sequences=[[5, 6, 7]], top_k=2)["scores"]
    assert score["top_token_ids"] == [None, [0, 1], [0, 1]]
    assert score["top_logprobs"] == [None, [0, -1], [0, -1]]


def test_each_sequence_is_a_scoring_request_of_one_share() -> None:
    service, generator = scoring()
    post(service, sequences=[[5, 6], [7, 8]], top_k=1, start=1, priority="batch", policy={"min_version": 0})
    first, second = generator.requests
    assert isinstance(first, ScoringRequest)
    assert isinstance(second, ScoringRequest)
    assert (first.share, first.share) == (second.share, RequestShare(first.share.id, 1 / 16))
    assert (list(first.prompt_token_ids), first.top_k, first.start, first.max_new_tokens) == ([5, 6], 1, 1, 1)
    assert first.rollout_id != second.rollout_id
    assert sorted(generator.released) == [first.rollout_id, second.rollout_id]


def test_a_lost_replica_costs_a_retry_and_an_update_costs_none() -> None:
    service, generator = scoring(None, GenerationLost("The generator replica died."), None)
    response = post(service, sequences=[[5, 6]], retries=1)
    assert response.json()["scores"] == [{"logprobs": [None, -6], "weight_version": "7"}]
    assert len(generator.requests) == 4


def test_a_sequence_that_fails_leaves_its_siblings_alone() -> None:
    document = scored(GenerationRejected("No."), "7", sequences=[[5, 6], [5, 6]])
    failed, good = document["scores"]
    error = {"kind": "generation", "message": "No.", "retryable": False}
    assert failed == {"logprobs": None, "weight_version": None, "error": error}
    assert good["logprobs"] == [None, -6]
    assert document["policy"]["oldest"] == "7"


def test_a_version_that_is_demanded_scores_every_sequence() -> None:
    service, _ = scoring("7", "8")
    service.store.current = 7
    response = post(service, sequences=[[5, 6], [5, 6]], policy={"version": 7})
    assert response.status_code == 409
    assert response.json()["type"] == "urn:rollout:problem:policy-not-current"
    assert response.json()["errors"][0]["message"] == ("a newer one has taken its place; version 8 scored a sequence")
    assert post(service, sequences=[[5, 6], [5, 6]], policy={"version": 7}).status_code == 200
