"""Traces that go on in another process. Source: https://www.w3.org/TR/trace-context/."""

from contextvars import Context, copy_context

from opentelemetry.context import attach
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

PROPAGATOR = TraceContextTextMapPropagator()


def context_below(traceparent: str) -> Context | None:
    """A context for a task whose spans, and whose calls of others, belong below this span.

    Args:
        traceparent: the header; `None` is returned for an empty one.
    """
    if not traceparent:
        return None
    context = copy_context()
    context.run(attach, PROPAGATOR.extract({"traceparent": traceparent}))
    return context
