"""A span for each request; below it spans of its first rollouts, their turns, generations, steps and agents' runs.

A request's span is below the one that its `traceparent` names. Source: https://www.w3.org/TR/trace-context/.
"""

from contextlib import AbstractContextManager, ExitStack
from urllib.parse import quote
from weakref import WeakKeyDictionary

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_client.contract.rollouts import SampleResult
from service.rollouts.episode import Episode
from service.rollouts.progress import RolloutObserver, Stage, Work
from service.settings import TracingSettings

PROPAGATOR = TraceContextTextMapPropagator()
SERVER_ERROR = 500
SERVICE_NAME = "rollout"


def tracer_of(settings: TracingSettings, replica: str, version: str, exporter: SpanExporter | None = None) -> Tracer:
    """A tracer whose spans name the service's `version` and the `replica`.

    Args:
        exporter: takes the spans instead of the endpoint.
    """
    resource = Resource.create(
        {"service.name": SERVICE_NAME, "service.version": version, "service.instance.id": replica}
    )
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(settings.sample_rate)), resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=settings.endpoint)))
    return provider.get_tracer("rollout_service")


def note_error(error: Exception) -> None:
    """Records an error that a response reports after its status was sent."""
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


class TracedRollouts(RolloutObserver):
    """Also tells another observer all that it is told."""

    def __init__(self, tracer: Tracer, other: RolloutObserver, rollouts_per_request: int | None = None) -> None:
        """Traces as many rollouts of a request as `TracingSettings.rollouts_per_request` says."""
        self._tracer = tracer
        self._other = other
        self._rollouts_per_request = rollouts_per_request
        self._begun: WeakKeyDictionary[Span, int] = WeakKeyDictionary()
        """Rollouts by the span of their request."""

    def during(self, stage: Stage, episode: Episode) -> AbstractContextManager[object]:
        observed = self._other.during(stage, episode)
        if not trace.get_current_span().get_span_context().trace_flags.sampled:
            # A span that is not recorded costs as much time as one that is.
            return observed
        both = ExitStack()
        both.enter_context(observed)
        if stage == "rollout" and self._has_enough():
            # Nothing below it is sampled then.
            both.enter_context(trace.use_span(INVALID_SPAN))
            return both
        identity = episode.identity
        attributes: dict[str, str | int] = {"rollout.task_name": identity.task_name}
        if stage == "rollout":
            attributes |= {
                "rollout.id": identity.rollout_id,
                "rollout.record": f"/v1/rollouts/{quote(identity.rollout_id, safe='')}",
                "rollout.sample": identity.idx,
                "rollout.generation_index": identity.generation_index,
            }
        both.enter_context(self._tracer.start_as_current_span(stage, attributes=attributes))
        return both

    def _has_enough(self) -> bool:
        """Whether the request has as many rollouts with spans as it may; if not, one begins."""
        request = trace.get_current_span()
        begun = self._begun.get(request, 0)
        if begun == self._rollouts_per_request:
            return True
        self._begun[request] = begun + 1
        return False

    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        if trace.get_current_span().get_span_context().trace_flags.sampled:
            PROPAGATOR.inject(carrier)
        return carrier.get("traceparent", "")

    def took(self, work: Work, seconds: float) -> None:
        self._other.took(work, seconds)

    def ended(self, result: SampleResult, staleness: int | None) -> None:
        self._other.ended(result, staleness)
