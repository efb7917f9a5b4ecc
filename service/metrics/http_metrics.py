"""How many requests each route gets, how they are answered, and how long that takes."""

from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.instruments import Instrument, SummedCounter, SummedHistogram
from service.metrics.rollout_metrics import SECONDS

NO_ROUTE = "none"
"""Of a path that no route has: paths of strangers are no tags."""


class HttpMetrics:
    """Of one ingress replica. Refused requests are those with a status of 400 and more."""

    def __init__(self) -> None:
        self._requests = SummedCounter(
            "rollout_http_requests_total", "Requests that were answered.", ("route", "method", "status")
        )
        self._seconds = SummedHistogram(
            "rollout_http_request_seconds", "Time until the end of the response.", SECONDS, ("route", "method")
        )
        self.instruments: tuple[Instrument, ...] = self._requests, self._seconds
        """What must be flushed."""

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        self._requests.add(1, route, method, str(status))
        self._seconds.observe(seconds, route, method)


class HttpMetricsMiddleware:
    """Tells `HttpMetrics` of each request, under the path of its route without `/v1`."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = monotonic(), 500

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            route = getattr(scope.get("route"), "path", NO_ROUTE).removeprefix("/v1")
            self._metrics.answered(route, scope["method"], status, monotonic() - began)
