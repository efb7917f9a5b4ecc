"""Options of a client and of each of its calls: address, API key, deadline, retries and headers. No I/O.

The API key is sent in the header `Authorization` of requests to the service, and never appears in a message, a log line
or a `repr`. httpx drops the header where a redirect leads to another host.
"""

import logging
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, cast
from uuid import uuid4

import httpx

from rollout_client.calls.call import Call, without_none
from rollout_client.errors import RolloutTimeout, ServiceUnreachable, StreamBroken
from rollout_client.retry import DEFAULT_RETRIES
from rollout_client.version import __version__

PYTHON_VERSION = ".".join(platform.python_version_tuple()[:2])
USER_AGENT = f"rollout-client/{__version__} python/{PYTHON_VERSION} httpx/{httpx.__version__}"
CONNECT_TIMEOUT_S = 5.0
"""Reaching a host takes milliseconds; only the rollout itself is long."""

SHORT_CALL_TIMEOUT_S = 60.0
"""For calls that play no rollouts and change no weights: longer than a proxy takes to come back."""

SHORT_CALL_ADVICE = "allow more with timeout_s."
ROLLOUT_ADVICE = "what was still running is cancelled. Allow more with timeout_s, or ask for fewer or shorter rollouts."
UPDATE_ADVICE = "the update may still go on: see client.policy.state(). Allow more with timeout_s."


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Timeout, retries and headers of one call. Its clock starts when this is made; no `timeout_s` sets no limit."""

    timeout_s: float | None
    retries: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    advice: str = ROLLOUT_ADVICE
    """The end of the sentence of `error`."""
    started_at: float = field(default_factory=time.monotonic)

    def remaining_s(self) -> float | None:
        """Seconds until the deadline; 0 after it."""
        return None if self.timeout_s is None else max(self.started_at + self.timeout_s - time.monotonic(), 0.0)

    def left_s(self) -> float | None:
        """Seconds until the deadline. Raises `RolloutTimeout` after it."""
        if (left_s := self.remaining_s()) == 0:
            raise self.error()
        return left_s

    def at_most(self, timeout_s: float) -> "CallLimits":
        """For one step of a longer call, never past the call's own deadline. Raises `RolloutTimeout` after that."""
        left_s = self.left_s()
        step_s = timeout_s if left_s is None else min(timeout_s, left_s)
        return replace(self, timeout_s=step_s, started_at=time.monotonic())

    def http_timeout(self) -> httpx.Timeout:
        """For one attempt. Raises `RolloutTimeout` after the deadline."""
        left_s = self.left_s()
        return httpx.Timeout(left_s, connect=min(CONNECT_TIMEOUT_S, left_s or CONNECT_TIMEOUT_S), pool=None)

    def error(self) -> RolloutTimeout:
        return RolloutTimeout(
            f"The response was not complete after {time.monotonic() - self.started_at:.3g} s; {self.advice}"
        )


@contextmanager
def before_the_response(url: str, limits: CallLimits) -> Iterator[None]:
    """Around sending a request, until the headers of its response have arrived."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise ServiceUnreachable(f"{url} does not answer: connecting timed out.", may_have_arrived=False) from error
    except httpx.TimeoutException as error:
        raise limits.error() from error
    except httpx.RequestError as error:
        may_have_arrived = not isinstance(error, httpx.ConnectError)
        raise ServiceUnreachable(f"{url} cannot be reached: {error}", may_have_arrived) from error


@contextmanager
def during_the_response(limits: CallLimits) -> Iterator[None]:
    """Around reading the body of a response."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise limits.error() from error
    except httpx.RequestError as error:
        raise StreamBroken(f"The response broke off: {error}") from error


DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "ROLLOUT_URL"


def service_url(base_url: str | None, http_client: httpx.Client | httpx.AsyncClient | None = None) -> httpx.URL:
    """`base_url` or, without it, that of `http_client`, then the environment variable `ROLLOUT_URL`, then loopback.

    It has no slash at its end.

    Raises:
        ValueError: what was found is not an `http` or `https` URL with a host.
    """
    of_http_client = "" if http_client is None else str(http_client.base_url)
    found = base_url or of_http_client or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    try:
        url = httpx.URL(found.rstrip("/"))
    except httpx.InvalidURL as error:
        raise ValueError(f"{found!r} is not a URL: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise ValueError(f"{found!r} is not the URL of a service; it must look like {DEFAULT_URL}.")
    return url


def without_password(url: httpx.URL) -> str:
    """`url` for messages."""
    return str(url.copy_with(userinfo=b""))


KEY_VARIABLE = "ROLLOUT_API_KEY"
LOOPBACK_HOSTS = {"localhost", "127.0.0.1", "::1"}
HTTPX_AGENT = "python-httpx/"
CAN_BE_SENT = re.compile(r"[\x21-\x7e]+")
logger = logging.getLogger("rollout_client")


def client_headers(
    api_key: str | None,
    url: httpx.URL,
    headers: Mapping[str, str] | None = None,
    http_client: httpx.Client | httpx.AsyncClient | None = None,
) -> httpx.Headers:
    """The headers of each request: `User-Agent`, `headers` and `Authorization`.

    Without `api_key`, the key is that of the environment variable `ROLLOUT_API_KEY`, unless `headers` or `http_client`
    identify the caller already. A `User-Agent` that the owner of `http_client` gave it stays.

    Raises:
        ValueError: both `api_key` and `headers` identify the caller, or the key has characters that no header can have.
    """
    theirs = httpx.Headers() if http_client is None else http_client.headers
    agent = theirs.get("user-agent", HTTPX_AGENT)
    known = merged({"user-agent": USER_AGENT if agent.startswith(HTTPX_AGENT) else agent}, headers)
    if "authorization" in known:
        if api_key is not None:
            raise ValueError("api_key and the header Authorization both identify the caller: leave one out.")
        return known
    if api_key is None and "authorization" not in theirs and (http_client is None or http_client.auth is None):
        api_key = os.environ.get(KEY_VARIABLE, "").strip() or None
    if api_key is None:
        return known
    if CAN_BE_SENT.fullmatch(api_key) is None:
        raise ValueError("The API key is empty, or has spaces or characters that are not ASCII: copy it again.")
    if url.scheme == "http" and url.host not in LOOPBACK_HOSTS:
        logger.warning("The API key goes to %s without encryption: use https.", url.host)
    return merged(known, {"authorization": f"Bearer {api_key}"})


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
    """Options of `with_options`, as the client's constructor takes them; `headers` are added to the client's."""

    timeout_s: float | None
    retries: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Address, limits and headers of a client's calls.

    Raises:
        ValueError: `retries` is negative.
    """

    base_url: httpx.URL
    timeout_s: float | None = None
    retries: int = DEFAULT_RETRIES
    headers: httpx.Headers = field(default_factory=httpx.Headers)

    def __post_init__(self) -> None:
        check_retries(self.retries)

    def replaced(self, options: ClientOptions) -> "ClientSettings":
        """These settings with `options` in place of their own; headers are added."""
        changes: dict[str, Any] = {**options, "headers": merged(self.headers, options.get("headers"))}
        return replace(self, **changes)

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
        retries = check_retries(options.get("retries", self.retries))
        return CallLimits(options.get("timeout_s", default_s), retries, headers, advice)

    def short_limits(self, options: CallOptions, longest_s: float = SHORT_CALL_TIMEOUT_S) -> CallLimits:
        """`limits` of a call that plays no rollouts and changes no weights."""
        return self.limits(options, longest_s, SHORT_CALL_ADVICE)

    def request(self, call: Call[Any], limits: CallLimits) -> dict[str, Any]:
        """The arguments of httpx for one attempt of `call`. Raises `RolloutTimeout` after the deadline."""
        return {
            "method": call.method,
            "url": f"{self.base_url}{call.path}",
            "params": without_none(call.query),
            "content": call.body,
            "headers": merged(self.headers, call.headers, limits.headers),
            "timeout": limits.http_timeout(),
        }


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


def merged(*parts: Mapping[str, str] | None) -> httpx.Headers:
    """Names are compared without their case; later parts replace."""
    headers = httpx.Headers()
    for part in parts:
        headers.update(part)
    return headers
