"""The key with which a client asks to be let in.

Guarantee: the key is in the header `Authorization` of requests to the service, and in no message, log line or `repr`.
httpx leaves the header out where a redirect leads to another host.
"""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

import httpx

KEY_VARIABLE = "ROLLOUT_API_KEY"
LOOPBACK_HOSTS = {"localhost", "127.0.0.1", "::1"}
CAN_BE_SENT = re.compile(r"[\x21-\x7e]+")
logger = logging.getLogger("rollout_client")


def key_headers(
    api_key: str | None,
    url: httpx.URL,
    headers: Mapping[str, str] | None = None,
    http_client: httpx.Client | httpx.AsyncClient | None = None,
) -> httpx.Headers:
    """The header with `api_key` or, without it, with the environment variable `ROLLOUT_API_KEY`.

    The variable is not used where `headers` or `http_client` say already who is calling.

    Raises:
        ValueError: both `api_key` and `headers` say who is calling, or the key has characters that no header can have.
    """
    has_header = "authorization" in httpx.Headers(headers)
    if api_key is not None and has_header:
        raise ValueError("api_key and the header Authorization both say who is calling: leave one out.")
    if http_client is not None:
        has_header |= "authorization" in http_client.headers or http_client.auth is not None
    if api_key is None and not has_header:
        api_key = os.environ.get(KEY_VARIABLE, "").strip() or None
    if api_key is None:
        return httpx.Headers()
    if CAN_BE_SENT.fullmatch(api_key) is None:
        raise ValueError("The API key is empty, or has spaces or characters that are not ASCII; copy it anew.")
    if url.scheme == "http" and url.host not in LOOPBACK_HOSTS:
        logger.warning("The API key goes to %s without encryption: use https.", url.host)
    return httpx.Headers({"authorization": f"Bearer {api_key}"})


def key_in_file(path: Path | None) -> str | None:
    """What the file holds, without white space around it; `None` for no file. Raises `OSError`, `ValueError`."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        raise ValueError(f"{path} holds no API key: it is not ASCII text.") from None
