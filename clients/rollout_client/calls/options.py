"""Options of a client and of each of its calls: address, API key, deadline, retries and headers. No I/O.

The API key is sent in the header `Authorization` of requests to the service, and never appears in a message, a log line
or a `repr`. httpx drops the header where a redirect leads to another host.
"""

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, cast
from uuid import uuid4

import httpx

from rollout_client.errors import RolloutTimeout, ServiceUnreachable, StreamBroken
from rollout_client.retry import DEFAULT_RETRIES
from rollout_client.version import USER_AGENT

CONNECT_TIMEOUT_S = 5.0
"""Reaching a host takes milliseconds; only the rollout itself is long."""

SHORT_CALL_TIMEOUT_S = 60.0
"""For calls that play no rollouts and change no weights: longer than a proxy takes to come back."""

SHORT_CALL_ADVICE = "allow more with timeout_s."
ROLLOUT_ADVICE = "what was still running is cancelled. Allow more with timeout_s, or ask for fewer or shorter rollouts."
UPDATE_ADVICE = "the update may still go on: ask client.policy(). Allow more with timeout_s."


@dataclass(frozen=True, slots=True)
class Deadline:
    """Lies `timeout_s` seconds after it was made; `None` sets no limit."""

    timeout_s: float | None
    started_at: float = field(default_factory=time.monotonic)
    advice: str = ROLLOUT_ADVICE
    """The end of the sentence of `error`."""

    def remaining_s(self) -> float | None:
        """Seconds until the deadline; 0 after it."""
        return None if self.timeout_s is None else max(self.started_at + self.timeout_s - time.monotonic(), 0.0)

    def left_s(self) -> float | None:
        """Seconds until the deadline. Raises `RolloutTimeout` after it."""
        if (left_s := self.remaining_s()) == 0:
            raise self.error()
        return left_s

    def http_timeout(self) -> httpx.Timeout:
        """For one attempt. Raises `RolloutTimeout` after the deadline."""
        left_s = self.left_s()
        return httpx.Timeout(left_s, connect=min(CONNECT_TIMEOUT_S, left_s or CONNECT_TIMEOUT_S), pool=None)

    def error(self) -> RolloutTimeout:
        return RolloutTimeout(
            f"The response was not complete after {time.monotonic() - self.started_at:.3g} s; {self.advice}"
        )


@contextmanager
def before_the_response(url: str, deadline: Deadline) -> Iterator[None]:
    """Around sending a request, until the headers of its response have arrived."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise ServiceUnreachable(f"{url} does not answer: connecting timed out.", may_have_arrived=False) from error
    except httpx.TimeoutException as error:
        raise deadline.error() from error
    except httpx.RequestError as error:
        may_have_arrived = not isinstance(error, httpx.ConnectError)
        raise ServiceUnreachable(f"{url} cannot be reached: {error}", may_have_arrived) from error


@contextmanager
def during_the_response(deadline: Deadline) -> Iterator[None]:
    """Around reading the body of a response."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise deadline.error() from error
    except httpx.RequestError as error:
        raise StreamBroken(f"The response broke off: {error}") from error


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

    The variable is not used where `headers` or `http_client` identify the caller already.

    Raises:
        ValueError: both `api_key` and `headers` identify the caller, or the key has characters that no header can have.
    """
    has_header = "authorization" in httpx.Headers(headers)
    if api_key is not None and has_header:
        raise ValueError("api_key and the header Authorization both identify the caller: leave one out.")
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
    """The key in the file, without white space around it; `None` for no file. Raises `OSError`, `ValueError`."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        raise ValueError(f"{path} does not hold an API key: it is not ASCII text.") from None


REQUEST_ID_HEADER = "x-request-id"
IDEMPOTENCY_KEY = "idempotency-key"
AUTOMATIC_KEY = "auto"
LONGEST_KEY = 255


class CallOptions(TypedDict, total=False):
    """Options of every call. The client's own apply to missing keys."""

    timeout_s: float | None
    """Seconds that the whole call may take, its retries included; `None` sets no limit."""
    retries: int
    """Further attempts after a transient failure (`rollout_client.retry`); 0 makes one attempt."""
    request_id: str
    """Sent as `X-Request-ID`; the service uses it in its logs and in its response."""
    idempotency_key: str
    """Sent as `Idempotency-Key` with each attempt of a rollout or of a job: one that is made again attaches to the run,
    or gets its answer. `"auto"` makes a new key for the call. A call that is cancelled ends its run."""


class ClientOptions(TypedDict, total=False):
    """Options of `with_options`."""

    timeout_s: float | None
    """Seconds that one call may take, its retries included; `None` sets no limit."""
    retries: int
    """Further attempts after a transient failure; 0 makes one attempt."""
    headers: Mapping[str, str]
    """Sent with every request, beside the headers that the client has."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Deadline, retries and headers of one call."""

    deadline: Deadline
    retries: int
    headers: Mapping[str, str] = field(default_factory=dict)

    def at_most(self, timeout_s: float) -> "CallLimits":
        """For one step of a longer call, never past the call's own deadline. Raises `RolloutTimeout` after that."""
        left_s = self.deadline.left_s()
        step_s = timeout_s if left_s is None else min(timeout_s, left_s)
        return replace(self, deadline=Deadline(step_s, advice=self.deadline.advice))


@dataclass(frozen=True, slots=True)
class ClientDefaults:
    """Defaults of a client's calls.

    Raises:
        ValueError: `retries` is negative.
    """

    timeout_s: float | None = None
    retries: int = DEFAULT_RETRIES
    headers: httpx.Headers = field(default_factory=httpx.Headers)

    def __post_init__(self) -> None:
        check_retries(self.retries)

    def replaced(self, options: ClientOptions) -> "ClientDefaults":
        """These defaults with `options` in place of their own; headers are added."""
        return ClientDefaults(
            timeout_s=options.get("timeout_s", self.timeout_s),
            retries=options.get("retries", self.retries),
            headers=merged(self.headers, options.get("headers")),
        )

    def request_headers(self) -> httpx.Headers:
        return merged(httpx.Headers({"user-agent": USER_AGENT}), self.headers)

    def limits(self, options: CallOptions, longest_s: float | None = None, advice: str = ROLLOUT_ADVICE) -> CallLimits:
        """Starts the clock of one call.

        Args:
            longest_s: bounds the client's `timeout_s` for calls that are short; a call's own `timeout_s` may exceed it.
            advice: what the error says when the time is over.

        Raises:
            ValueError: `retries` is negative.
        """
        default_s = min((limit for limit in (self.timeout_s, longest_s) if limit is not None), default=None)
        request_id, key = options.get("request_id"), options.get("idempotency_key")
        headers = {} if request_id is None else {REQUEST_ID_HEADER: request_id}
        if key is not None:
            headers[IDEMPOTENCY_KEY] = quoted_key(uuid4().hex if key == AUTOMATIC_KEY else key)
        return CallLimits(
            Deadline(options.get("timeout_s", default_s), advice=advice),
            check_retries(options.get("retries", self.retries)),
            headers,
        )


def call_options(options: Mapping[str, Any]) -> CallOptions:
    """The part of `options` that is for the client."""
    return cast(CallOptions, {name: options[name] for name in CallOptions.__annotations__ if name in options})


def without_call_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `options` that is for the service."""
    return {name: value for name, value in options.items() if name not in CallOptions.__annotations__}


def quoted_key(key: str) -> str:
    """The key as a String of RFC 9651. Raises `ValueError` unless it has 1 to 255 printable ASCII characters."""
    if not key.isascii() or not key.isprintable() or not 1 <= len(key) <= LONGEST_KEY:
        raise ValueError(f"idempotency_key={key!r}: send 1 to {LONGEST_KEY} printable ASCII characters.")
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def check_retries(retries: int) -> int:
    if retries < 0:
        raise ValueError(f"retries={retries}: send 0 for one attempt, or how many may follow it.")
    return retries


def user_agent_of(http_client: httpx.Client | httpx.AsyncClient | None) -> httpx.Headers:
    """The `User-Agent` that a caller gave its own HTTP client; empty if that one has httpx's default."""
    given = "" if http_client is None else http_client.headers.get("user-agent", "")
    is_default = given.startswith("python-httpx/")
    return httpx.Headers({"user-agent": given} if given and not is_default else {})


def merged(headers: httpx.Headers, added: Mapping[str, str] | None) -> httpx.Headers:
    """Names are compared without their case; `added` replaces."""
    both = httpx.Headers(headers)
    both.update(added)
    return both
