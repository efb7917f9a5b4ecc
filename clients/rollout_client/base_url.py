"""Where the service is."""

import os

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "ROLLOUT_URL"


def service_url(base_url: str | None, http_client: httpx.Client | httpx.AsyncClient | None = None) -> httpx.URL:
    """`base_url` or, without it, that of `http_client`, then the environment variable `ROLLOUT_URL`, then loopback.

    Raises:
        ValueError: what was found is not an `http` or `https` URL with a host.
    """
    of_http_client = "" if http_client is None else str(http_client.base_url)
    found = base_url or of_http_client or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    try:
        url = httpx.URL(found)
    except httpx.InvalidURL as error:
        raise ValueError(f"{found!r} is not a URL: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise ValueError(f"{found!r} is not the URL of a service; it must look like {DEFAULT_URL}.")
    return url


def shown(url: httpx.URL) -> str:
    """`url` for messages: without the password that it may carry, and without a slash at its end."""
    return str(url.copy_with(userinfo=b"")).rstrip("/")
