"""The middlewares around all routes: they check `Host` and `Origin`, and name the contract's version in each response.

A browser sends requests of any page to services of its machine. A page whose name resolves to loopback could read the
answers; `Host` gives it away. Another page cannot read them, but could change the weights; `Origin` gives it away. Both
are refused before any route does anything. The reader of the contract's version is `rollout_client/version.py`.
"""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_client.contract.problems import FieldProblem
from rollout_client.version import CONTRACT_HEADER, CONTRACT_VERSION
from service.access.access_control import AccessControl
from service.http.request_ids import problem_response
from service.problems import HOST_NOT_ALLOWED, NOT_ALLOWED, RequestProblem, shown

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
