"""What Serve's proxy does with a request before Serve reads its headers. `serve.env` names `proxy_middlewares`.

Serve obeys headers of its own, which are no part of the contract, and answers a value that is not UTF-8 with a 500.
Whoever may play could have rollouts go on without a client, or choose the replica. So they end here. Bodies are
gathered here too.
"""

from uuid import uuid4

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from service.http.request_ids import ALLOWED_ID, id_not_allowed
from service.problems import REQUEST_ID_HEADER, problem_response
from service.routes.gathered_bodies import GatheredBodies

HEADERS_OF_SERVE = (
    "x-request-disconnect-disabled",
    "x-request-timeout-seconds",
    "serve-multiplexed-model-id",
    "x-session-id",
)
"""Serve takes an underscore for a hyphen."""


class HeadersOfServe:
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
        headers = [header for header in scope["headers"] if named(header[0]) not in HEADERS_OF_SERVE]
        await self._app({**scope, "headers": headers}, receive, send)


def named(header: bytes) -> str:
    return header.decode("latin-1").lower().replace("_", "-")


def proxy_middlewares() -> list[Middleware]:
    """The middlewares that Serve puts before its own."""
    return [Middleware(HeadersOfServe), Middleware(GatheredBodies)]
