"""Where the service is: the argument, then the `http_client`, then `ROLLOUT_URL`, then loopback."""

import httpx
import pytest

from rollout_client.calls.options import service_url, shown


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
