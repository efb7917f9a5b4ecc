"""The names under which the service answers, and the web pages that may use it."""

import httpx
import pytest

from service.access.access_control import AccessControl
from service.settings import AccessSettings
from tests.service.scripted_http import ScriptedHttp

ON_LOOPBACK = AccessControl.of(AccessSettings())


def answer(access: AccessControl, headers: list[tuple[str, str]], path: str = "/policy") -> httpx.Response:
    return ScriptedHttp(access=access).request("GET", path, headers=headers)


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "[::1]", "localhost."])
def test_a_service_on_loopback_answers_under_its_own_names(host: str) -> None:
    assert answer(ON_LOOPBACK, [("host", host)]).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "", ":8000"])
@pytest.mark.parametrize("path", ["/policy", "/v1/policy", "/healthz", "/docs", "/no/such/route"])
def test_a_name_that_only_resolves_to_loopback_is_refused(host: str, path: str) -> None:
    refused = answer(ON_LOOPBACK, [("host", host)], path)
    assert (refused.status_code, refused.json()["type"]) == (403, "urn:rollout:problem:not-allowed")
    assert refused.json()["errors"][0]["value"] == host
    assert refused.json()["request_id"] == refused.headers["x-request-id"]


def test_two_hosts_are_refused() -> None:
    refused = answer(ON_LOOPBACK, [("host", "localhost"), ("host", "evil.example")])
    assert (refused.status_code, refused.json()["errors"][0]["value"]) == (403, "localhost, evil.example")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:9000", "https://[", "localhost:8000"]
)
def test_the_web_page_of_another_site_is_refused_where_no_key_is_asked_for(origin: str) -> None:
    refused = answer(ON_LOOPBACK, [("host", "localhost:8000"), ("origin", origin)])
    assert (refused.status_code, refused.json()["type"]) == (403, "urn:rollout:problem:not-allowed")


def test_the_services_own_page_may_use_it() -> None:
    assert answer(ON_LOOPBACK, [("host", "localhost:8000"), ("origin", "http://LOCALHOST:8000")]).status_code == 200


def test_behind_a_guard_the_origin_is_the_guards_matter() -> None:
    access = AccessControl.of(AccessSettings(guarded_by="a gateway"))
    assert answer(access, [("host", "inner:8000"), ("origin", "https://outer.example")]).status_code == 200
