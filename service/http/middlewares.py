"""The middleware around all routes, and the handlers that turn everything they raise into a problem document.

The id of a request is `X-Request-ID` where the caller sends one, otherwise a new UUID. The response's header of that
name and its `request_id`, every problem document and every log line of the request have it. Ray Serve adds that header
to every response, outside of this application, with what the caller sent: so `service/routes/proxy_middlewares.py`
refuses an id before Serve reads it. Two requests may have the same id: what must be unique is not made of it alone.

A browser sends requests of any page to services of its machine. A page whose name resolves to loopback could read the
answers; `Host` gives it away. Another page cannot read them, but could change the weights; `Origin` gives it away. Both
are refused before any route does anything. The reader of the contract's version is `rollout_client/version.py`.

Serve's proxy cancels its own call of the ingress replica when a client goes away, and takes the connections of its
clients with it when it dies. When requests come, are answered, or their clients leave, by the hundred in one moment, at
most `STEPS_PER_ITERATION` of them begin, get a message, send one or end in one iteration of the event loop, which has
time for other requests between them.
"""

import asyncio
import logging
import re
from collections.abc import Mapping
from uuid import uuid4

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, TaskCancelledError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.failures import RolloutFailure, StoreFailure
from rollout_client.contract.base import FieldProblem, Problem
from rollout_client.version import CONTRACT_HEADER, CONTRACT_VERSION
from service.access.access_control import AccessControl
from service.problems import (
    NOT_ALLOWED,
    PROBLEM_JSON,
    REQUEST_ID_HEADER,
    RequestProblem,
    field_problem,
    internal_error,
    invalid_request,
    problem_of,
    shown,
)
from service.rollouts.pacing import LoopPacer

ALLOWED_ID = re.compile(r"[\x20-\x7e]{1,128}")
"""Printable ASCII: logs, headers and JSON carry it unchanged."""
_LOOPBACK_NAME = re.compile(r"(localhost|127\.0\.0\.1|\[::1])\.?(:\d*)?")
"""Values of `Host` of a request to this machine, in lower case."""
_CLIENT_CLOSED_REQUEST = 499
"""Nginx's status for this case. Nobody reads it."""
logger = logging.getLogger("rollout_service.routes")


class RequestMiddleware:
    """Gives requests their ids and responses their headers; refuses ids, hosts and origins that are not allowed."""

    def __init__(self, app: ASGIApp, sets_id_header: bool) -> None:
        """`sets_id_header` is false behind a server that adds the header to every response itself."""
        self._app = app
        self._sets_id_header = sets_id_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID_HEADER, uuid4().hex)
        if ALLOWED_ID.fullmatch(request_id) is None:
            problem: RequestProblem | None = id_not_allowed(request_id)
            request_id = uuid4().hex
        else:
            problem = _problem_with_names(headers, scope["app"].state.services.access)
        answered = {CONTRACT_HEADER: CONTRACT_VERSION}
        if self._sets_id_header:
            answered[REQUEST_ID_HEADER] = request_id
        scope.setdefault("state", {}).update(request_id=request_id, response_headers=answered)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(answered)
            await send(message)

        app = self._app if problem is None else problem_response(problem.problem, request_id)
        await app(scope, receive, send_with_headers)


def request_id_of(request: Request) -> str:
    """The id that `RequestMiddleware` gave the request."""
    return str(request.state.request_id)


def problem_response(problem: Problem, request_id: str, headers: Mapping[str, str] | None = None) -> Response:
    """The response with `problem`, which gets the id of its request."""
    document = problem.model_copy(update={"request_id": request_id})
    return Response(document.model_dump_json(), problem.status, dict(headers or {}), media_type=PROBLEM_JSON)


def id_not_allowed(given: str) -> RequestProblem:
    message = "it must have 1 to 128 characters, all printable ASCII"
    return invalid_request(FieldProblem(field=f"header.{REQUEST_ID_HEADER}", message=message, value=shown(given)))


def _problem_with_names(headers: Headers, access: AccessControl) -> RequestProblem | None:
    """The problem with the names by which the request calls the service and its own page."""
    if not access.is_open_on_loopback:
        return None
    host, origin = ", ".join(headers.getlist("host")).lower(), headers.get("origin")
    if _LOOPBACK_NAME.fullmatch(host) is None:
        message = "a service that asks for no key answers under localhost, 127.0.0.1 and [::1] alone"
        return RequestProblem(NOT_ALLOWED, [FieldProblem(field="header.Host", message=message, value=shown(host))])
    if origin is None or origin.partition("://")[2].lower() == host:
        return None
    message = "web pages of other sites may not use a service that asks for no key"
    return RequestProblem(NOT_ALLOWED, [FieldProblem(field="header.Origin", message=message, value=shown(origin))])


def install_error_handlers(app: FastAPI) -> None:
    for raised in (RequestProblem, StoreFailure, RolloutFailure, RequestValidationError):
        app.add_exception_handler(raised, _on_problem)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_disconnect)
    app.add_exception_handler(Exception, _on_unexpected_error)


async def _on_problem(request: Request, error: Exception) -> Response:
    request_id = request_id_of(request)
    if isinstance(error, RolloutFailure):
        logger.warning("A deployment does not answer.", exc_info=error, extra={"request_id": request_id})
    if isinstance(error, RequestValidationError):
        error = invalid_request(*(field_problem(finding) for finding in error.errors()))
    problem = problem_of(error)
    return problem_response(problem.problem, request_id, problem.headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = Problem(
        type="about:blank",
        title=str(error.detail),
        status=error.status_code,
        detail=f"{request.method} {request.url.path}: {error.detail}. The routes are listed at /docs.",
    )
    headers = dict(error.headers or {})
    if "Allow" in headers:
        # Starlette names the methods of the first route with this path alone.
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        methods = [route.methods or () for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        headers["Allow"] = ", ".join(sorted(set().union(*methods)))
    return problem_response(problem, request_id_of(request), headers)


async def _on_client_disconnect(_request: Request, _error: Exception) -> Response:
    """The client went away before its body had arrived."""
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    request_id = request_id_of(request)
    log_unexpected_error(error, request_id)
    # Starlette sends this response outside of all middleware, which would have set the headers.
    return problem_response(internal_error(error).problem, request_id, request.state.response_headers)


def log_unexpected_error(error: Exception, request_id: str) -> None:
    logger.error("A request failed unexpectedly.", exc_info=error, extra={"request_id": request_id})


STEPS_PER_ITERATION = 16
"""A step takes 0.1 to 2 ms: to route a request, to copy a part of its body, or to give it up
with its rollouts and calls."""


def request_pacer() -> LoopPacer:
    """The pacer of the requests of one ingress replica."""
    return LoopPacer(STEPS_PER_ITERATION)


class ServeRequests:
    """Gives the application a disconnect where Serve raises the cancellation of the proxy's call, or the proxy's death.

    Otherwise each client that goes away would be an unexpected error, with three tracebacks in the log.
    """

    def __init__(self, app: ASGIApp, pacer: LoopPacer) -> None:
        self._app = app
        self._pacer = pacer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_in_turn() -> Message:
            try:
                message = await receive()
            except (TaskCancelledError, ActorDiedError, ActorUnavailableError, OutOfMemoryError):
                message = {"type": "http.disconnect"}
            await self._pacer.wait_for_turn(receive)
            return message

        async def send_in_turn(message: Message) -> None:
            await self._pacer.wait_for_turn(send)
            await send(message)

        await self._pacer.wait_for_turn(receive)
        # In a task of its own, which Serve does not cancel.
        answering = asyncio.ensure_future(self._app(scope, receive_in_turn, send_in_turn))
        try:
            await asyncio.wait({answering})
        except asyncio.CancelledError:
            await self._end(answering)
            raise
        answering.result()

    async def _end(self, answering: "asyncio.Future[None]") -> None:
        """Cancels the task when its turn has come, or when this is cancelled."""
        try:
            await self._pacer.wait_for_turn(answering)
        finally:
            answering.cancel()
            await asyncio.wait({answering})
