"""The tracer of one ingress replica, which sends its spans in a thread of its own."""

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Tracer

from service.settings import TracingSettings

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
