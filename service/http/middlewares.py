"""The middlewares around all routes: request ids, checks of `Host` and `Origin`, and the contract's version.

The id of a request is `X-Request-ID` where the caller sends one, otherwise a new UUID. The response's header of that
name and its `request_id`, every problem document and every log line of the request have it. Ray Serve adds that header
to every response, outside of this application, with what the caller sent: so `service/routes/proxy_middlewares.py`
refuses an id before Serve reads it. Two requests may have the same id: what must be unique is not made of it alone.

A browser sends requests of any page to services of its machine. A page whose name resolves to loopback could read the
answers; `Host` gives it away. Another page cannot read them, but could change the weights; `Origin` gives it away. Both
are refused before any route does anything. The reader of the contract's version is `rollout_client/version.py`.
"""

import re
from collections.abc import Mapping, Sequence
from uuid import uuid4

from fastapi import Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_client.contract.problems import FieldProblem, Problem
from rollout_client.version import CONTRACT_HEADER, CONTRACT_VERSION
from service.access.access_control import AccessControl
from service.problems import (
    HOST_NOT_ALLOWED,
    NOT_ALLOWED,
    PROBLEM_JSON,
    REQUEST_ID_HEADER,
    RequestProblem,
    invalid_request,
    shown,
)

ALLOWED_ID = re.compile(r"[\x20-\x7e]{1,128}")
"""Printable ASCII: logs, headers and JSON carry it unchanged."""


class RequestIdMiddleware:
    """Gives every request its id before any handler runs, and answers an id that is not allowed with 422."""

    def __init__(self, app: ASGIApp, sets_header: bool) -> None:
        """`sets_header` is false behind a server that adds the header to every response itself."""
        self._app = app
        self._sets_header = sets_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER)
        app, request_id = self._app, uuid4().hex if given is None else given
        if given is not None and ALLOWED_ID.fullmatch(given) is None:
            request_id = uuid4().hex
            app = problem_response(id_not_allowed(given).problem, request_id)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["request_id_headers"] = {REQUEST_ID_HEADER: request_id} if self._sets_header else {}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await app(scope, receive, send_with_id if self._sets_header else send)


def problem_response(problem: Problem, request_id: str, headers: Mapping[str, str] | None = None) -> Response:
    """The response with `problem`, which gets the id of its request."""
    document = problem.model_copy(update={"request_id": request_id})
    return Response(document.model_dump_json(), problem.status, dict(headers or {}), media_type=PROBLEM_JSON)


def id_not_allowed(given: str) -> RequestProblem:
    message = "it must have 1 to 128 characters, all printable ASCII"
    return invalid_request(FieldProblem(field=f"header.{REQUEST_ID_HEADER}", message=message, value=shown(given)))


def request_id_of(request: Request) -> str:
    """The id that `RequestIdMiddleware` gave the request."""
    request_id: str = request.state.request_id
    return request_id


def request_id_headers_of(request: Request) -> dict[str, str]:
    """The headers for a response that `RequestIdMiddleware` does not see."""
    headers: dict[str, str] = request.state.request_id_headers
    return headers


HEADER = (CONTRACT_HEADER.encode(), CONTRACT_VERSION.encode())


class ContractVersionMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), HEADER]
            await send(message)

        await self._app(scope, receive, send_with_version)


ANY_BELOW = "*."


class HostCheckMiddleware:
    """Applies the access control of the application before any route does anything."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            access: AccessControl = scope["app"].state.services.access
            problem = problem_with(Headers(scope=scope), access)
            if problem is not None:
                app = problem_response(problem.problem, scope["state"]["request_id"])
        await app(scope, receive, send)


def problem_with(headers: Headers, access: AccessControl) -> RequestProblem | None:
    hosts = headers.getlist("host")
    if access.allowed_hosts and not (len(hosts) == 1 and is_among(hosts[0], access.allowed_hosts)):
        message = "the service does not answer under this name; access.allowed_hosts of its config lists the names"
        value = shown(", ".join(hosts))
        return RequestProblem(HOST_NOT_ALLOWED, [FieldProblem(field="header.Host", message=message, value=value)])
    origin = headers.get("origin")
    if origin is not None and access.is_open_on_loopback and host_of(origin) not in map(str.lower, hosts):
        message = "web pages of other sites may not use a service that asks for no key"
        return RequestProblem(NOT_ALLOWED, [FieldProblem(field="header.Origin", message=message, value=shown(origin))])
    return None


def host_of(origin: str) -> str:
    """Host and port of an `Origin`; empty for `null`."""
    return origin.partition("://")[2].lower()


def is_among(host: str, allowed: Sequence[str]) -> bool:
    """Whether `host`, with or without a port, is one of `allowed` (in lower case)."""
    name = host.lower()
    if not name.endswith("]"):
        name = name.rpartition(":")[0] or name
    name = name.removesuffix(".")
    return any(name == one or (one.startswith(ANY_BELOW) and name.endswith(one[1:])) for one in allowed)
