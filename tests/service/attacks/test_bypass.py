"""Attempts to be let in without a key, with the key of another, or with a key of another scope."""

import asyncio
import hmac
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.access.keys import hash_of, parsed_keys
from service.problems import RequestProblem
from tests.service.keyed_http import SAMPLE, KeyedHttp
from tests.virtual_time import runs

BODY = {"samples": [SAMPLE]}


@pytest.fixture
def keyed(tmp_path: Path) -> KeyedHttp:
    return KeyedHttp(tmp_path)


def refused(keyed: KeyedHttp, method: str = "POST", path: str = "/rollout", **options: Any) -> httpx.Response:
    """The answer to a request, which must not be a success and must not have started anything."""
    answer = keyed.service.request(method, path, **options)
    assert answer.status_code in (401, 403, 404, 405), answer.text
    assert not keyed.service.has_started_something
    assert keyed.service.store.calls == []
    return answer


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer null",
        "Bearer undefined",
        "Basic {key}",
        "{key}",
        "Token {key}",
        "Bearer {hash}",
        "Bearer {key}x",
        "Bearer x{key}",
        "Bearer {key} {key}",
        "Bearer {key},Bearer {key}",
        'Bearer "{key}"',
        "Bearer\x00{key}",
        "Bearer {key}\x00",
        "Bearer *",
        "Bearer \xff\xfe",
    ],
)
def test_what_is_not_exactly_a_valid_key_is_refused(keyed: KeyedHttp, authorization: str) -> None:
    key = keyed.keys["rollout"]
    value = authorization.format(key=key, hash=hash_of(key)).encode("latin-1")
    answer = refused(keyed, headers=[(b"authorization", value)], json=BODY)
    assert (answer.status_code, answer.headers["www-authenticate"][:22]) == (401, 'Bearer realm="rollout"'[:22])
    assert key not in answer.text
    assert hash_of(key) not in answer.text


@pytest.mark.parametrize("order", [0, 1])
def test_two_headers_are_refused_whichever_of_them_is_valid(keyed: KeyedHttp, order: int) -> None:
    values = [f"Bearer {keyed.keys['rollout']}", "Bearer other"][:: 1 if order else -1]
    assert refused(keyed, headers=[("authorization", value) for value in values], json=BODY).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-for": "127.0.0.1"},
        {"x-real-ip": "127.0.0.1", "forwarded": "for=127.0.0.1"},
        {"host": "localhost"},
        {"x-original-url": "/healthz", "x-rewrite-url": "/healthz"},
        {"x-http-method-override": "GET"},
        {"x-api-key": "{key}"},
        {"cookie": "authorization=Bearer {key}"},
        {"proxy-authorization": "Bearer {key}"},
        {"upgrade": "websocket", "connection": "upgrade"},
    ],
)
def test_no_other_header_lets_a_request_in(keyed: KeyedHttp, headers: dict[str, str]) -> None:
    filled = {name: value.format(key=keyed.keys["rollout"]) for name, value in headers.items()}
    assert refused(keyed, headers=filled, json=BODY).status_code == 401


def test_a_key_in_the_query_or_the_body_lets_nothing_in(keyed: KeyedHttp) -> None:
    key = keyed.keys["admin"]
    query = {"authorization": f"Bearer {key}", "access_token": key, "api_key": key}
    assert refused(keyed, params=query, json=BODY | {"authorization": f"Bearer {key}"}).status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "/rollout/",
        "//rollout",
        "/v1//rollout",
        "/V1/ROLLOUT",
        "/v1/v1/rollout",
        "/%72ollout",
        "/healthz/../rollout",
        "/healthz/..%2frollout",
        "/healthz;/rollout",
        "/rollout%00",
        "/docs/../rollout",
        "/v1/healthz%2f..%2f..%2frollout",
        "/tasks/../rollout",
    ],
)
def test_no_spelling_of_a_path_leads_past_the_key(keyed: KeyedHttp, path: str) -> None:
    assert refused(keyed, path=path, json=BODY, follow_redirects=True).status_code in (401, 404)


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "PUT", "GETX", "get"])
@pytest.mark.parametrize("path", ["/rollout", "/policy", "/info", "/policy/rollback"])
def test_no_other_method_leads_past_the_key(keyed: KeyedHttp, method: str, path: str) -> None:
    assert refused(keyed, method, path).status_code in (401, 405)


@pytest.mark.parametrize(
    ("name", "method", "path"),
    [
        ("read", "POST", "/rollout"),
        ("rollout", "POST", "/policy/rollback"),
        ("rollout", "GET", "/tasks/../policy"),
        ("read", "DELETE", "/policy/names/..%2f..%2frollout"),
        ("read", "PUT", "/policy/versions/7"),
        ("policy", "GET", "/policy"),
    ],
)
def test_no_key_reaches_a_route_of_another_scope(keyed: KeyedHttp, name: str, method: str, path: str) -> None:
    headers = keyed.bearer(name) | {"x-scope": "admin", "scope": "admin"}
    answer = refused(keyed, method, path, headers=headers, params={"scope": "admin"}, follow_redirects=True)
    assert answer.status_code in (403, 404)


def test_a_recorded_request_is_refused_once_its_key_is_withdrawn(keyed: KeyedHttp) -> None:
    recorded: dict[str, Any] = {"headers": keyed.bearer("rollout"), "json": BODY}
    assert keyed.service.request("POST", "/rollout", **recorded).status_code == 200
    keyed.write({"read": {}})
    keyed.let_check()
    played = len(keyed.service.generator.requests)
    assert keyed.service.request("POST", "/rollout", **recorded).status_code == 401
    assert len(keyed.service.generator.requests) == played


@runs
async def test_while_a_key_is_rotated_no_moment_refuses_it_or_lets_in_another(keyed: KeyedHttp) -> None:
    """The file is replaced, truncated and written while requests with the old key and a wrong one come in."""
    good = keyed.path.read_text()
    for content in (good[:10], "", good, good + " ", "keys: []x", good):
        keyed.path.write_text(content)
        keyed.let_check()
        callers = await asyncio.gather(
            *(keyed.access.caller_of([f"Bearer {keyed.keys['read']}"], "read") for _ in range(20))
        )
        assert [caller.name for caller in callers] == ["read"] * 20
        with pytest.raises(RequestProblem):
            await keyed.access.caller_of(["Bearer rollout-wrong"], "read")


@pytest.mark.parametrize("guess", ["", "rollout-", "nearly", "exactly", "other"])
def test_every_guess_is_compared_with_every_key_in_constant_time(
    keyed: KeyedHttp, guess: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess that is right, or nearly, is compared as often as any other, and never by `==`."""
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def compare_digest(valid: str, given: str) -> bool:
        compared.append((len(valid), len(given)))
        return compare(valid, given)

    key = keyed.keys["rollout"]
    guesses = {"nearly": key[:-1], "exactly": key, "other": keyed.keys["admin"]}
    ring = parsed_keys(keyed.path.read_bytes())
    monkeypatch.setattr("service.access.keys.hmac.compare_digest", compare_digest)
    ring.caller_with(guesses.get(guess, guess))
    assert compared == [(64, 64)] * 4
