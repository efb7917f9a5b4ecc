"""Middlewares of Serve's proxy, which run before Serve reads a request's headers. `serve.env` names them.

Serve obeys headers of its own, which are not part of the contract, and answers a value that is not UTF-8 with a 500.
With them a caller could keep rollouts running without a client, or choose the replica. So they are removed here. Bodies
are gathered here too, before they go to an ingress replica.
"""

import asyncio
from contextlib import suppress
from functools import partial
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.middlewares import ALLOWED_ID, id_not_allowed, problem_response
from service.problems import REQUEST_ID_HEADER

GATHERED_BYTES = 2**18
GATHERED_WITHIN_S = 10.0
"""From the first byte of a part to its last one. A whole body never waits."""
BODY = "http.request"


class _GatheredBodies:
    """Passes bodies on in parts of `GATHERED_BYTES`, or of what has arrived within `GATHERED_WITHIN_S`.

    Each part is a call between two processes, which stops the event loop of the ingress replica for about 0.2 ms: a
    thousand clients that send a byte a second would take a fifth of its time.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, partial(_gathered, receive) if scope["type"] == "http" else receive, send)


async def _gathered(receive: Receive) -> Message:
    """The next message of a request, with as much of its body as `_GatheredBodies` says."""
    first = await receive()
    if first["type"] != BODY or not first.get("more_body", False):
        return first
    body = bytearray(first.get("body", b""))
    more_body = True
    with suppress(TimeoutError):
        async with asyncio.timeout(GATHERED_WITHIN_S):
            while more_body and len(body) < GATHERED_BYTES:
                message = await receive()
                if message["type"] != BODY:
                    return message
                body += message.get("body", b"")
                more_body = message.get("more_body", False)
    return {"type": BODY, "body": bytes(body), "more_body": more_body}


HEADERS_OF_SERVE = (
    "x-request-disconnect-disabled",
    "x-request-timeout-seconds",
    "serve-multiplexed-model-id",
    "x-session-id",
)
"""Serve takes an underscore for a hyphen."""


class _HeadersOfServe:
    """Takes the headers of Serve out of each request, and answers a request id that is not allowed with 422."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" not in scope:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER)
        if scope["type"] == "http" and given is not None and ALLOWED_ID.fullmatch(given) is None:
            request_id = uuid4().hex
            refusal = problem_response(id_not_allowed(given).problem, request_id, {REQUEST_ID_HEADER: request_id})
            await refusal(scope, receive, send)
            return
        headers = [header for header in scope["headers"] if _normalized(header[0]) not in HEADERS_OF_SERVE]
        await self._app({**scope, "headers": headers}, receive, send)


def _normalized(header: bytes) -> str:
    """The name of a header as Serve compares it."""
    return header.decode("latin-1").lower().replace("_", "-")


def proxy_middlewares() -> list[Middleware]:
    """The middlewares that Serve puts before its own."""
    return [Middleware(_HeadersOfServe), Middleware(_GatheredBodies)]
