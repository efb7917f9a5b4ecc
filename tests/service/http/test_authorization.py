"""Keys over HTTP: who is let in, who is not, and what is said then."""

from base64 import b64encode
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from service.access.keys import SCOPES
from service.routes import tinker, trainers
from service.settings import TrainersSettings
from tests.fakes.scoring_generator import ScoringGenerator
from tests.service.keyed_http import KeyedHttp, access_of_a_key
from tests.service.openapi_document import DOCUMENT, OPERATIONS
from tests.service.scripted import ScriptedGenerator
from tests.service.scripted_http import ScriptedHttp

ROUTES_OF_SCOPES = {
    "read": """GET mismatch, GET models, GET get_model_info, GET loads, GET model_info, GET workers, GET tasks,
        GET info, GET metrics, GET info/vocabulary, GET policy, GET policy/layout""",
    "policy": """GET policy/versions/{version}/upload, PUT policy/versions/{version}, DELETE policy/names/{name},
        POST policy/rollback, POST tasks/{task_name}/certify""",
    "rollout": """POST rollout, GET rollouts, GET rollouts/{rollout_id}, POST rollouts/logprobs,
        POST jobs, GET jobs, GET jobs/{job_id}, GET jobs/{job_id}/events, GET jobs/{job_id}/cursor,
        POST jobs/{job_id}/acknowledge, DELETE jobs, DELETE jobs/{job_id},
        POST replay, POST score, POST blobs, GET blobs/{name}, GET tasks/{task_name}/samples,
        POST sessions, GET sessions, GET sessions/{session_id}, GET sessions/{session_id}/samples,
        GET sessions/{session_id}/drift, POST sessions/{session_id}/reward, DELETE sessions/{session_id},
        POST chat/completions, POST completions, POST responses, POST messages, POST messages/count_tokens,
        POST tokenize, POST detokenize, POST generate, POST inference/v1/generate, POST abort_request,
        POST flush_cache""",
}
NEEDED = {
    name.strip().replace(" ", " /v1/"): scope for scope, names in ROUTES_OF_SCOPES.items() for name in names.split(",")
}
OPEN = ("GET /v1/health", "GET /v1/health_generate", "GET /v1/healthz", "GET /v1/readyz")
OF_A_SESSION = {
    "GET /v1/sessions/{session_id}/v1/models",
    "POST /v1/sessions/{session_id}/v1/chat/completions",
    "POST /v1/sessions/{session_id}/v1/responses",
    "POST /v1/sessions/{session_id}/v1/messages",
    "POST /v1/sessions/{session_id}/v1/messages/count_tokens",
    "POST /v1/sessions/{session_id}/v1/tokenize",
    "POST /v1/sessions/{session_id}/generate",
    "POST /v1/sessions/{session_id}/inference/v1/generate",
}
"""They take the key of the session: tests/service/routes/test_sessions.py."""


@pytest.fixture
def keyed(tmp_path: Path) -> KeyedHttp:
    return KeyedHttp(tmp_path)


def call(service: ScriptedHttp, name: str, authorization: str | None, prefix: str = "/v1") -> httpx.Response:
    """One request to the route, with a body that no route accepts."""
    method, path = name.split()
    path = path.removeprefix("/v1").format(
        job_id="j", rollout_id="r", task_name="chess", version=7, name="no-such", session_id="s"
    )
    headers = {} if authorization is None else {"authorization": authorization}
    return service.request(method, f"{prefix}{path}", headers=headers, content=b"{" if method != "GET" else None)


def test_every_route_states_its_scope_in_the_openapi_document() -> None:
    assert [name for name, operation in OPERATIONS.items() if "security" not in operation] == []
    stated = {
        name: [scope for requirement in operation["security"] for scope in requirement["Key"]]
        for name, operation in OPERATIONS.items()
        if operation["security"] and name not in OF_A_SESSION
    }
    assert {name for name, one in OPERATIONS.items() if one["security"] == [{"SessionKey": []}]} == OF_A_SESSION
    assert stated == {name: [scope] for name, scope in NEEDED.items()}
    assert {name for name, operation in OPERATIONS.items() if operation["security"] == []} == set(OPEN)
    assert DOCUMENT["components"]["securitySchemes"]["Key"]["scheme"] == "bearer"


@pytest.mark.parametrize("prefix", ["/v1", ""])
@pytest.mark.parametrize("name", NEEDED)
def test_a_route_refuses_no_key_and_one_of_another_scope(keyed: KeyedHttp, name: str, prefix: str) -> None:
    missing = call(keyed.service, name, None, prefix)
    assert (missing.status_code, missing.json()["type"]) == (401, "urn:rollout:problem:not-authenticated")
    assert missing.headers["www-authenticate"] == 'Bearer realm="rollout"'
    for scope, key in keyed.keys.items():
        answer = call(keyed.service, name, f"Bearer {key}", prefix)
        if scope in (NEEDED[name], "admin"):
            assert answer.status_code not in (401, 403), scope
        else:
            assert (answer.status_code, answer.json()["type"]) == (403, "urn:rollout:problem:not-allowed")
            challenge = f'Bearer realm="rollout", error="insufficient_scope", scope="{NEEDED[name]}"'
            assert answer.headers["www-authenticate"] == challenge
    assert not keyed.service.has_started_something


def test_a_key_may_be_the_password_in_the_address_and_nothing_else_of_it(keyed: KeyedHttp) -> None:
    key = keyed.keys["read"]
    given = {f"any:{key}": 200, f":{key}": 200, f"{key}:": 401, key: 401, f"{key}:other": 401}
    for credentials, status in given.items():
        encoded = b64encode(credentials.encode()).decode()
        assert call(keyed.service, "GET /v1/policy", f"Basic {encoded}").status_code == status
    for malformed in ("Basic", "Basic !", f"Basic {key}"):
        assert call(keyed.service, "GET /v1/policy", malformed).status_code == 401


def test_trainers_need_the_scope_of_what_they_do(tmp_path: Path) -> None:
    keyed = KeyedHttp(tmp_path, trainers=TrainersSettings())
    for route in trainers.router.routes:
        assert isinstance(route, APIRoute)
        name = f"{min(route.methods)} {route.path}"
        needed = "read" if "GET" in route.methods else "rollout" if "session" in route.path else "policy"
        refused = call(keyed.service, name, None, prefix="")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, 401)
        answers = {own: call(keyed.service, name, keyed.bearer(own)["authorization"], prefix="") for own in SCOPES}
        allowed = {scope for scope, answer in answers.items() if answer.status_code != 403}
        assert allowed == {needed, "admin"}, name


@pytest.mark.parametrize("name", OPEN)
def test_an_open_route_asks_for_no_key(keyed: KeyedHttp, name: str) -> None:
    assert call(keyed.service, name, None).status_code == 200


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_refusals_of_a_key_are_documented(name: str) -> None:
    assert ({"401", "403"} <= OPERATIONS[name]["responses"].keys()) == (name not in OPEN)


def test_no_route_has_its_body_read_before_its_key_is_checked() -> None:
    routes = [route for route in ScriptedHttp().app.routes if isinstance(route, APIRoute)]
    assert len(routes) == 2 * len(OPERATIONS) + len([*tinker.router.routes, *trainers.router.routes])
    assert [route.path for route in routes if route.body_field is not None] == []


def test_the_rollouts_of_a_key_share_the_engines_as_one_party(tmp_path: Path) -> None:
    access, key = access_of_a_key(tmp_path, weight=4)
    headers = {"authorization": f"bearer {key}"}
    bodies = {
        "/rollout": {"samples": [{"task_name": "math", "messages": [{"role": "user", "content": "What is 1 + 1?"}]}]},
        "/score": {"sequences": [[5, 6]]},
    }
    for route, generator in {"/rollout": ScriptedGenerator(["A"]), "/score": ScoringGenerator([""])}.items():
        service = ScriptedHttp(generator=generator, access=access)
        assert service.request("POST", route, json=bodies[route], headers=headers).status_code == 200
        [share] = [request.share for request in generator.requests]
        assert (share.key, share.key_weight, share.weight) == ("team", 4.0, 1.0)
