"""A span for each request, below the span that its `traceparent` names. Source: https://www.w3.org/TR/trace-context/."""

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.traces import PROPAGATOR

SERVER_ERROR = 500


def note_error(error: Exception) -> None:
    """Of an error that a response tells after its status was sent."""
    span = trace.get_current_span()
    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR))


class TracingMiddleware:
    """The span of a request ends with its response. What is begun within it is traced below it."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        parent = PROPAGATOR.extract(dict(Headers(scope=scope)))
        with self._tracer.start_as_current_span(
            method, parent, SpanKind.SERVER, {"http.request.method": method, "url.path": scope["path"]}
        ) as span:

            async def send_noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    span.set_attribute("http.response.status_code", status)
                    if status >= SERVER_ERROR:
                        span.set_status(Status(StatusCode.ERROR))
                await send(message)

            try:
                await self._app(scope, receive, send_noted)
            finally:
                if (route := getattr(scope.get("route"), "path", None)) is not None:
                    span.update_name(f"{method} {route}")
                    span.set_attribute("http.route", route)
                if (request_id := scope.get("state", {}).get("request_id")) is not None:
                    span.set_attribute("rollout.request_id", request_id)
