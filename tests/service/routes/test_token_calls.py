"""Calls of token ids in the ingress, SGLang's and vLLM's: their weights, their share, and the routes beside them."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.protocols.model_server import CallsToAbort
from service.access.access_control import OPEN_TO_ALL, AccessControl
from tests.fakes.model_server import JSON_PARTS, ScriptedModelServer
from tests.service.keyed_http import access_of_a_key
from tests.service.routes.test_model_server import TOKENS
from tests.service.scripted_http import ScriptedHttp


class Http:
    """The service, over a scripted model server."""

    def __init__(self, access: AccessControl = OPEN_TO_ALL, key: str = "") -> None:
        self.server = ScriptedModelServer()
        self.service = ScriptedHttp(access=access, model_server=self.server)
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.service.request("POST", path, json=body, headers=self._headers)

    def get(self, path: str) -> Any:
        return self.service.request("GET", path, headers=self._headers).json()


@pytest.mark.parametrize("endpoint", TOKENS)
@pytest.mark.parametrize(
    ("body", "least", "version", "policy"),
    [
        ({"weight_version": {"min_version": 3, "exact_version": None}}, 3, None, None),
        ({"weight_version": {"exact_version": 4}}, 4, 4, None),
        ({"lora_path": "run-b", "weight_version": {"min_version": 2}}, 2, None, "run-b"),
        ({"weight_version": {"min_version": None, "exact_version": None}, "lora_path": None}, 0, None, None),
    ],
)
def test_a_body_says_which_weights_may_answer(
    endpoint: str, body: dict[str, Any], least: int, version: int | None, policy: str | None
) -> None:
    http = Http()
    assert http.post(f"/{endpoint}", body).status_code == 200
    [request] = http.server.requests
    assert (request.min_weight_version, request.weight_version, request.policy) == (least, version, policy)


@pytest.mark.parametrize(
    ("endpoint", "body", "choices"),
    [
        ("generate", {"input_ids": [5, 6]}, 1),
        ("generate", {"input_ids": [[5], [6], [7]]}, 3),
        ("generate", {"text": ["a", "b"], "sampling_params": {"n": 3}}, 6),
        ("generate", {"input_ids": [[5], [6]], "sampling_params": {"n": 2}}, 4),
        ("generate", {"input_ids": [5], "sampling_params": {"n": "many"}}, 1),
        ("inference/v1/generate", {"token_ids": [5], "sampling_params": {"n": 4}}, 4),
    ],
)
def test_each_prompt_and_each_sample_counts(endpoint: str, body: dict[str, Any], choices: int) -> None:
    http = Http()
    assert http.post(f"/{endpoint}", body).status_code == 200
    assert http.server.requests[0].choices == choices


def test_the_calls_of_a_trainer_share_the_engines_as_one_party() -> None:
    http = Http()
    for path in ("generate", "generate", "inference/v1/generate", "generate?priority=batch", "generate?priority=2.5"):
        assert http.post(f"/{path}", {}).status_code == 200
    shares = [request.share for request in http.server.requests]
    assert [share.weight for share in shares] == [1.0, 1.0, 1.0, 1 / 16, 2.5]
    assert shares[0].id == shares[1].id == shares[2].id
    assert len({share.id for share in shares}) == 3


@pytest.mark.parametrize(
    ("body", "rid"),
    [({"abort_all": True}, ""), ({"rid": [], "abort_all": True}, ""), ({"rid": "a", "abort_all": False}, "a")],
)
def test_an_abort_names_calls_of_its_caller_up_to_now(tmp_path: Path, body: dict[str, Any], rid: str) -> None:
    http = Http(*access_of_a_key(tmp_path))
    http.post("/generate", {})
    answer = http.post("/abort_request", body)
    assert (answer.status_code, answer.content) == (200, b"")
    [request], [aborted] = http.server.requests, http.server.aborted
    assert request.received_at < aborted.until <= time.monotonic()
    assert request.ingress
    assert aborted == CallsToAbort(request.share.key, rid, request.ingress, aborted.until)


@pytest.mark.parametrize("body", [{}, {"rid": "a", "abort_all": True}, {"rid": ""}, {"rid": ["a"]}, {"all": True}])
def test_an_abort_that_names_no_calls_is_refused(body: dict[str, Any]) -> None:
    http = Http()
    assert (http.post("/abort_request", body).status_code, http.server.aborted) == (422, [])


MODEL = {
    "model_path": "tiny",
    "tokenizer_path": "tiny",
    "is_generation": True,
    "preferred_sampling_params": None,
    "weight_version": "0",
}


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/workers", {"workers": [{"url": "http://service", "worker_type": "regular", "is_healthy": True}]}),
        ("/v1/loads?include=core", {"loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}]}),
        ("/get_model_info", MODEL),
    ],
)
def test_a_trainer_finds_one_worker_and_its_model(path: str, answer: dict[str, Any]) -> None:
    assert Http().get(path) == answer


def test_calls_in_flight_are_counted_until_they_end() -> None:
    server = ScriptedModelServer([0.05, *JSON_PARTS])

    async def running(http: httpx.AsyncClient) -> Any:
        return (await http.get("/loads")).json()["loads"][0]["num_running_reqs"]

    async def counted(http: httpx.AsyncClient) -> list[int]:
        calls = [asyncio.create_task(http.post(f"/{path}", json={})) for path in (*TOKENS, "v1/chat/completions")]
        while len(server.requests) < 3:
            await asyncio.sleep(0)
        during = await running(http)
        await asyncio.gather(*calls)
        return [during, await running(http)]

    assert asyncio.run(ScriptedHttp(model_server=server).asked(counted)) == [2, 0]
