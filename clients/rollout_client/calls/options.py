"""The options of a client and of each of its calls, and what follows from both for one call. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, cast
from uuid import uuid4

import httpx

from rollout_client.deadline import ROLLOUT_ADVICE, Deadline
from rollout_client.retry import DEFAULT_RETRIES
from rollout_client.version import USER_AGENT

REQUEST_ID_HEADER = "x-request-id"
IDEMPOTENCY_KEY = "idempotency-key"
AUTOMATIC_KEY = "auto"
LONGEST_KEY = 255


class CallOptions(TypedDict, total=False):
    """What every call takes. An option that is missing is the client's own."""

    timeout_s: float | None
    """Seconds that the whole call may take, its retries included; `None` sets no limit."""
    retries: int
    """Further attempts after one that failed in a way that may pass (`rollout_client.retry`); 0 makes one attempt."""
    request_id: str
    """Sent as `X-Request-ID`; the service uses it in its logs and in its response."""
    idempotency_key: str
    """Sent as `Idempotency-Key` with each attempt of a rollout or of a job: one that is made again attaches to the run,
    or gets its answer. `"auto"` makes a new key for the call. A call that is cancelled ends its run."""


class ClientOptions(TypedDict, total=False):
    """What `with_options` takes."""

    timeout_s: float | None
    """Seconds that one call may take, its retries included; `None` sets no limit."""
    retries: int
    """Further attempts after one that failed in a way that may pass; 0 makes one attempt."""
    headers: Mapping[str, str]
    """Sent with every request, beside the headers that the client has."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What applies to one call."""

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
    """What a client's calls use where they have no option of their own.

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
    """What of `options` is for the client."""
    return cast(CallOptions, {name: options[name] for name in CallOptions.__annotations__ if name in options})


def without_call_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What of `options` is for the service."""
    return {name: value for name, value in options.items() if name not in CallOptions.__annotations__}


def quoted_key(key: str) -> str:
    """The key as a String of RFC 9651. Raises `ValueError` for one that is no printable ASCII, or has over 255."""
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
