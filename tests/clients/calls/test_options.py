"""Options of the client and of one call: the key, sent and never shown, the base URL, and which option wins."""

import asyncio
import logging
import traceback
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_client import AsyncRolloutClient, RequestRejected, RolloutClient, RolloutError
from rollout_client.calls.options import (
    KEY_VARIABLE,
    CallLimits,
    CallOptions,
    ClientDefaults,
    Deadline,
    key_in_file,
    service_url,
    shown,
)
from tests.clients.scripted_service import SUMMARY, result, sample

KEY = "rollout-0123456789abcdefghijklmnopqrstuvwxyz"
URL = "https://service.example"
OTHER = "rollout-other"


def requests_of(answers: list[httpx.Response] | None = None, **options: Any) -> list[httpx.Request]:
    """The requests that a rollout sends; `answers` come before the rollout's own."""
    sent: list[httpx.Request] = []
    scripted = iter(answers or ())

    def respond(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return next(scripted, None) or httpx.Response(200, json={**SUMMARY, "samples": [result()]})

    http_options = options.pop("http_options", {})

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(respond), **http_options) as http_client:
            client = AsyncRolloutClient(URL, http_client=http_client, retries=0, **options)
            await client.rollout([sample()])

    asyncio.run(run())
    return sent


def sent_with(**options: Any) -> str | None:
    [request] = requests_of(**options)
    authorization: str | None = request.headers.get("authorization")
    return authorization


def test_the_argument_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sent_with() is None
    monkeypatch.setenv(KEY_VARIABLE, f"{KEY}\n")
    assert sent_with() == f"Bearer {KEY}"
    assert sent_with(api_key=OTHER) == f"Bearer {OTHER}"
    monkeypatch.setenv(KEY_VARIABLE, " ")
    assert sent_with() is None


def test_the_environment_does_not_replace_what_the_caller_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert sent_with(headers={"Authorization": "Bearer mine"}) == "Bearer mine"
    assert sent_with(http_options={"headers": {"Authorization": "Bearer mine"}}) == "Bearer mine"
    assert sent_with(http_options={"auth": ("user", "password")}) == "Basic dXNlcjpwYXNzd29yZA=="


def test_two_answers_to_who_is_calling_are_refused() -> None:
    with pytest.raises(ValueError, match="both identify the caller"):
        AsyncRolloutClient("http://127.0.0.1:1", api_key=KEY, headers={"authorization": "Bearer mine"})


@pytest.mark.parametrize("key", ["", " ", f"{KEY} {KEY}", f"{KEY}\r\nX-Other: 1", "schlüssel"])
def test_a_key_that_a_header_cannot_carry_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ValueError, match="API key") as raised:
        RolloutClient("http://127.0.0.1:1", api_key=key)
    assert not key.strip() or key not in str(raised.value)


@pytest.mark.parametrize(
    ("location", "reaches"),
    [
        ("https://service.example/v1/rollout", True),
        ("https://evil.example/rollout", False),
        ("http://service.example/rollout", False),
        ("https://service.example:8443/rollout", False),
    ],
)
def test_a_redirect_takes_the_key_to_no_other_host(location: str, reaches: bool) -> None:
    redirect = httpx.Response(307, headers={"location": location})
    first, second = requests_of(answers=[redirect], api_key=KEY, http_options={"follow_redirects": True})
    assert first.headers["authorization"] == f"Bearer {KEY}"
    assert ("authorization" in second.headers) == reaches


def test_a_client_of_its_own_follows_no_redirect() -> None:
    with RolloutClient("http://127.0.0.1:1", api_key=KEY) as client:
        assert client._connection.http.follow_redirects is False


def test_the_key_is_in_no_repr_log_or_error(caplog: pytest.LogCaptureFixture) -> None:
    refused = httpx.Response(401, json={"type": "t", "title": "No", "status": 401, "detail": "No."})
    texts: list[str] = []
    with caplog.at_level(logging.DEBUG):
        with RolloutClient("http://127.0.0.1:1", api_key=KEY, retries=1) as client:
            texts += [repr(vars(client)), repr(client._connection.defaults), repr(vars(client._connection))]
            with pytest.raises(RolloutError) as unreachable:
                client.tasks(timeout_s=1)
        with pytest.raises(RequestRejected) as rejected:
            requests_of(answers=[refused], api_key=KEY)
    for raised in (unreachable, rejected):
        texts += ["".join(traceback.format_exception(raised.value)), repr(raised.value), repr(vars(raised.value))]
    texts += [record.getMessage() for record in caplog.records]
    assert [text for text in texts if KEY in text] == []


@pytest.mark.parametrize(
    ("url", "warns"),
    [("http://service.example", True), ("https://service.example", False), ("http://localhost:8000", False)],
)
def test_a_key_that_travels_without_encryption_is_warned_of(
    url: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    RolloutClient(url, api_key=KEY).close()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["The API key goes to service.example without encryption: use https."] * warns


def test_a_file_holds_a_key_with_white_space_around_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"\n{KEY}\n")
    assert (key_in_file(path), key_in_file(None)) == (KEY, None)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="does not hold an API key"):
        key_in_file(path)


@pytest.mark.parametrize(
    ("client_s", "options", "longest_s", "expected"),
    [
        (None, {}, None, None),
        (None, {}, 60, 60),
        (600, {}, 60, 60),
        (5, {}, 60, 5),
        (600, {}, None, 600),
        (5, {"timeout_s": 90}, 60, 90),
        (5, {"timeout_s": None}, 60, None),
    ],
)
def test_the_timeout_of_a_call_comes_before_that_of_the_client(
    client_s: float | None, options: CallOptions, longest_s: float | None, expected: float | None
) -> None:
    assert ClientDefaults(timeout_s=client_s).limits(options, longest_s).deadline.timeout_s == expected


def test_a_step_of_a_call_ends_no_later_than_the_call() -> None:
    limits = CallLimits(Deadline(100, advice="wait."), retries=3)
    assert limits.at_most(60).deadline.timeout_s == 60
    left_s = limits.at_most(600).deadline.timeout_s
    assert left_s is not None
    assert 90 < left_s <= 100
    assert CallLimits(Deadline(None), retries=3).at_most(60).deadline.timeout_s == 60


@pytest.mark.parametrize("retries", [-1, -10])
def test_negative_retries_are_a_value_error(retries: int) -> None:
    with pytest.raises(ValueError, match=f"^retries={retries}: "):
        ClientDefaults(retries=retries)
    with pytest.raises(ValueError, match=f"^retries={retries}: "):
        ClientDefaults().limits({"retries": retries})


def test_added_headers_replace_those_of_the_same_name_in_any_case() -> None:
    defaults = ClientDefaults(headers=httpx.Headers({"X-A": "1", "x-b": "2"})).replaced({"headers": {"x-a": "3"}})
    assert defaults.headers == httpx.Headers({"x-a": "3", "x-b": "2"})


@pytest.mark.parametrize(
    ("argument", "of_http_client", "variable", "expected"),
    [
        ("http://argument", "http://client", "http://variable", "http://argument"),
        (None, "http://client", "http://variable", "http://client"),
        (None, "", "http://variable", "http://variable"),
        (None, None, "http://variable", "http://variable"),
        (None, None, "", "http://127.0.0.1:8000"),
        (None, None, None, "http://127.0.0.1:8000"),
    ],
)
def test_the_argument_comes_first_and_loopback_last(
    monkeypatch: pytest.MonkeyPatch,
    argument: str | None,
    of_http_client: str | None,
    variable: str | None,
    expected: str,
) -> None:
    monkeypatch.delenv("ROLLOUT_URL", raising=False)
    if variable is not None:
        monkeypatch.setenv("ROLLOUT_URL", variable)
    http_client = None if of_http_client is None else httpx.Client(base_url=of_http_client)
    assert shown(service_url(argument, http_client)) == expected


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
def test_what_is_not_the_url_of_a_service_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError, match=r"is not (a URL|the URL of a service)"):
        service_url(url)


def test_a_url_is_shown_without_its_password_and_last_slash() -> None:
    assert shown(httpx.URL("https://me:secret@host:8000/path/")) == "https://host:8000/path"
