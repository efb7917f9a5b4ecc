"""Where the service is."""

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"


def checked_url(base_url: str) -> httpx.URL:
    """Raises `ValueError` if `base_url` is not an `http` or `https` URL with a host."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{base_url!r} is no URL: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise ValueError(f"{base_url!r} is no URL of a service; it must look like {DEFAULT_URL}.")
    return url


def address(base_url: httpx.URL) -> str:
    return str(base_url).rstrip("/")
