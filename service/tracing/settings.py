"""Where traces go: a part of the config."""

from pydantic import Field

from deployments.strict_settings import StrictSettings


class TracingSettings(StrictSettings):
    """Traces of requests, by OpenTelemetry."""

    endpoint: str = Field(pattern=r"^https?://")
    """Where a collector takes traces by OTLP over HTTP, such as `http://collector:4318/v1/traces`. The environment
    variable `OTEL_EXPORTER_OTLP_HEADERS` has the headers."""
    sample_rate: float = Field(default=1.0, ge=0, le=1)
    """The share of requests that are traced, among those whose `traceparent` does not say it."""
    rollouts_per_request: int | None = Field(default=8, ge=1)
    """How many rollouts of a traced request have spans, those that begin first. Null for all: with their turns,
    generations and steps they take 0.1 ms of processor time a span."""
