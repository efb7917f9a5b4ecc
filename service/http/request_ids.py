"""The id of each request: `X-Request-ID` where the caller sends one, otherwise a new UUID.

The id is in the response's header of the same name, in the response's `request_id`, in every problem document and in
every log line of the request. Ray Serve adds that header to every response, outside of this application, with what the
caller sent: so `service/routes/proxy_middlewares.py` refuses an id before Serve reads it. Two requests may have the
same id: what must be unique is not made of it alone.
"""

import re
from collections.abc import Mapping
from uuid import uuid4

from fastapi import Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_client.contract.problems import FieldProblem, Problem
from service.problems import PROBLEM_JSON, REQUEST_ID_HEADER, RequestProblem, invalid_request, shown

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
