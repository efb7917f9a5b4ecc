"""Attempts to be let in without a key, with the key of another, or with a key of another scope."""

import hmac
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.access.keys import hash_of, parsed_keys
from tests.service.keyed_http import KeyedHttp
from tests.service.scripted_http import SAMPLE

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
        "Bearer null",
        "Basic {key}",
        "{key}",
        "Bearer {hash}",
        "Bearer {key}x",
        "Bearer {key} {key}",
        'Bearer "{key}"',
        "Bearer\x00{key}",
        "Bearer {key}\x00",
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
        {"host": "localhost"},
        {"x-original-url": "/healthz", "x-rewrite-url": "/healthz"},
        {"x-http-method-override": "GET"},
        {"x-api-key": "{key}"},
        {"cookie": "authorization=Bearer {key}"},
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
        "/v1//rollout",
        "/V1/ROLLOUT",
        "/v1/v1/rollout",
        "/%72ollout",
        "/healthz/../rollout",
        "/healthz/..%2frollout",
        "/healthz;/rollout",
        "/rollout%00",
    ],
)
def test_no_spelling_of_a_path_leads_past_the_key(keyed: KeyedHttp, path: str) -> None:
    assert refused(keyed, path=path, json=BODY, follow_redirects=True).status_code in (401, 404)


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "PUT", "GETX", "get"])
@pytest.mark.parametrize("path", ["/rollout", "/policy", "/info", "/policy/rollback"])
def test_no_other_method_leads_past_the_key(keyed: KeyedHttp, method: str, path: str) -> None:
    assert refused(keyed, method, path).status_code in (401, 405)


def test_guesses_are_compared_with_all_keys_in_constant_time(keyed: KeyedHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess that is right, or nearly, is compared as often as any other, and never by `==`."""
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def compare_digest(valid: str, given: str) -> bool:
        compared.append((len(valid), len(given)))
        return compare(valid, given)

    ring, key = parsed_keys(keyed.path.read_bytes()), keyed.keys["rollout"]
    monkeypatch.setattr("service.access.keys.hmac.compare_digest", compare_digest)
    for guess in ("", "rollout-", key[:-1], key, keyed.keys["admin"]):
        compared.clear()
        ring.caller_with(guess)
        assert compared == [(64, 64)] * 4
