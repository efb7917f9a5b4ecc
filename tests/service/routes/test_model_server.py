"""OpenAI's and Anthropic's APIs: bytes in and out, who may call, and what a call counts."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from deployments.failures import GenerationLost
from service.access.access_control import OPEN_TO_ALL, AccessControl
from service.routes.dependencies import _request_id
from tests.fakes.model_server import ScriptedModelServer
from tests.service.keyed_http import access_of_a_key
from tests.service.scripted_http import ScriptedHttp

CALLS = {
    "chat/completions": b'{"messages": []}',
    "completions": b'{"prompt": "Hi"}',
    "responses": b'{"input": "Hi"}',
    "messages": b'{"max_tokens": 3}',
    "messages/count_tokens": b"{}",
    "tokenize": b'{"prompt": "Hi"}',
    "detokenize": b'{"tokens": [5]}',
    "generate": b'{"input_ids": [5]}',
    "inference/v1/generate": b'{"token_ids": [5]}',
}
TOKENS = ("generate", "inference/v1/generate")
JSON = {"content-type": "application/json"}


def serving(server: ScriptedModelServer, access: AccessControl = OPEN_TO_ALL) -> ScriptedHttp:
    return ScriptedHttp(access=access, model_server=server)


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("endpoint", CALLS)
def test_a_call_and_its_answer_pass_as_they_were_sent(endpoint: str, prefix: str) -> None:
    server = ScriptedModelServer()
    reply = serving(server).request("POST", f"{prefix}/{endpoint}", content=CALLS[endpoint], headers=JSON)
    assert (reply.status_code, reply.headers["content-type"], reply.content) == (200, "application/json", b'{"id":"a"}')
    [request] = server.requests
    weight = 1.0 if endpoint in TOKENS else 16.0
    assert (request.endpoint, request.body, request.share.weight) == (endpoint, CALLS[endpoint], weight)
    assert server.released == [request.rollout_id]


@pytest.mark.parametrize(("query", "weight"), [("batch", 1 / 16), ("2.5", 2.5)])
def test_a_call_has_the_priority_that_its_address_asks_for(query: str, weight: float) -> None:
    server = ScriptedModelServer()
    path = f"/v1/chat/completions?priority={query}"
    for _ in range(2):
        assert serving(server).request("POST", path, content=b"{}", headers=JSON).status_code == 200
    first, second = (request.share for request in server.requests)
    assert first.weight == weight
    assert first.id != second.id, "each call is a party"


def test_models_are_asked_for_without_a_body() -> None:
    server = ScriptedModelServer()
    assert serving(server).request("GET", "/v1/models").json() == {"id": "a"}
    assert [(request.endpoint, request.body) for request in server.requests] == [("models", b"")]


def test_a_call_that_no_replica_can_answer_may_be_tried_again() -> None:
    server = ScriptedModelServer([GenerationLost("It is gone.")])
    answer = serving(server).request("POST", "/v1/messages", content=b"{}", headers=JSON)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["detail"] == "It is gone."


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/v1/chat/completions", b'{"n": 5}', 422),
        ("/chat/completions", b'{"n": 5}', 422),
        ("/v1/chat/completions", b'{"n": 4}', 200),
        ("/v1/messages", b'{"n": 5}', 200),
    ],
)
def test_each_choice_of_a_call_is_a_rollout_of_its_key(tmp_path: Path, path: str, content: bytes, status: int) -> None:
    access, key = access_of_a_key(tmp_path, max_rollouts=4)
    server = ScriptedModelServer()
    service = serving(server, access)
    answer = service.request("POST", path, content=content, headers={**JSON, "authorization": f"Bearer {key}"})
    assert answer.status_code == status
    if status == 422:
        [error] = answer.json()["errors"]
        assert (error["field"], server.requests) == ("n", [])
        assert error["message"].startswith("5 rollouts are more than max_rollouts of the key team allows, which is 4;")


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions", "responses", "messages", *TOKENS])
def test_the_weights_of_a_call_can_be_demanded(endpoint: str) -> None:
    server = ScriptedModelServer()
    service = serving(server)
    call = {"content": CALLS[endpoint], "headers": JSON}
    assert service.request("POST", f"/v1/{endpoint}?policy=run-b&version=3", **call).status_code == 200
    assert service.request("POST", f"/v1/{endpoint}?beta=true", **call).status_code == 200
    demands = [(asked.policy, asked.weight_version, asked.min_weight_version) for asked in server.requests]
    assert demands == [("run-b", 3, 3), (None, None, 0)]
    assert service.store.calls == [("wait_for", "run-b", 0, 3, None)]
    refused = service.request("POST", f"/v1/{endpoint}?version=-1", **call)
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "query.version")


def test_no_route_makes_what_it_needs_in_a_thread() -> None:
    """FastAPI runs functions and classes that are not asynchronous in threads, of which it has forty."""

    def calls_of(dependant: Dependant) -> Iterator[Any]:
        yield dependant.call
        for needed in dependant.dependencies:
            yield from calls_of(needed)

    routes = [route for route in ScriptedHttp().app.routes if isinstance(route, APIRoute)]
    calls = {call for route in routes for call in calls_of(route.dependant)}
    assert _request_id in calls
    are_asynchronous = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    functions = {call if inspect.isroutine(call) or inspect.isclass(call) else type(call).__call__ for call in calls}
    assert {function for function in functions if not any(is_so(function) for is_so in are_asynchronous)} == set()
