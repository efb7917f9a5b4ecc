"""Options of the client and of one call: the key, sent and never shown, the base URL, and which option wins."""

import asyncio
import logging
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.responses import RedirectResponse

from rollout_client import AsyncRolloutClient, RequestRejected, RolloutClient, RolloutError
from rollout_client.calls.options import (
    KEY_VARIABLE,
    CallLimits,
    CallOptions,
    ClientSettings,
    key_in_file,
    service_url,
    without_password,
)
from rollout_client.errors import StatusError
from tests.clients.client_calls import play, recording
from tests.clients.scripted_service import Json, ScriptedService, sample

KEY = "rollout-0123456789abcdefghijklmnopqrstuvwxyz"
URL = "https://service.example"
OTHER = "rollout-other"


def requests_of(
    answers: Iterable[httpx.Response] = (), http_options: Json | None = None, **options: Any
) -> list[httpx.Request]:
    """The requests that a rollout sends; `answers` come before the rollout's own."""
    http_client, requests = recording(answers, **(http_options or {}))
    asyncio.run(AsyncRolloutClient(URL, http_client=http_client, retries=0, **options).rollout([sample()]))
    return requests


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


def test_a_client_of_its_own_follows_no_redirect(service: ScriptedService) -> None:
    service.rollouts.append(lambda _: RedirectResponse("/rollout"))
    with pytest.raises(StatusError, match=r"\(307\)"):
        play(service.url, sample(), client={"api_key": KEY})
    assert len(service.bodies) == 1


def test_the_key_is_in_no_repr_log_or_error(caplog: pytest.LogCaptureFixture) -> None:
    refused = httpx.Response(401, json={"type": "t", "title": "No", "status": 401, "detail": "No."})
    texts: list[str] = []
    with caplog.at_level(logging.DEBUG):
        with RolloutClient("http://127.0.0.1:1", api_key=KEY, retries=1) as client:
            texts.append(repr(vars(client)))
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
def test_a_key_that_travels_unencrypted_is_warned_of(url: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
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
    assert ClientSettings(httpx.URL(URL), timeout_s=client_s).limits(options, longest_s).timeout_s == expected


def test_a_step_of_a_call_ends_no_later_than_the_call() -> None:
    assert CallLimits(100).at_most(60).timeout_s == 60
    assert 90 < (CallLimits(100).at_most(600).timeout_s or 0) <= 100
    assert CallLimits(None).at_most(60).timeout_s == 60


@pytest.mark.parametrize("retries", [-1, -10])
def test_negative_retries_are_a_value_error(retries: int) -> None:
    with pytest.raises(ValueError, match=f"^retries={retries}: "):
        ClientSettings(httpx.URL(URL), retries=retries)
    with pytest.raises(ValueError, match=f"^retries={retries}: "):
        ClientSettings(httpx.URL(URL)).limits({"retries": retries})


def test_the_argument_comes_first_and_loopback_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_URL", "http://variable/")
    http_client = httpx.Client(base_url="http://client")
    assert str(service_url("http://argument/at/", http_client)) == "http://argument/at"
    assert str(service_url(None, http_client)) == "http://client"
    assert str(service_url(None, httpx.Client())) == str(service_url(None)) == "http://variable"
    monkeypatch.setenv("ROLLOUT_URL", "")
    assert str(service_url(None)) == "http://127.0.0.1:8000"
    monkeypatch.delenv("ROLLOUT_URL")
    assert str(service_url(None)) == "http://127.0.0.1:8000"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
def test_what_is_not_the_url_of_a_service_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError, match=r"is not (a URL|the URL of a service)"):
        service_url(url)


def test_a_url_is_shown_without_its_password() -> None:
    assert without_password(httpx.URL("https://me:secret@host:8000/path")) == "https://host:8000/path"
