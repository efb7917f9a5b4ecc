"""The spans of a trace, from a collector that takes OpenTelemetry's protocol over HTTP, in the order of a waterfall."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

Attribute = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Span:
    trace_id: str
    span_id: str
    parent_id: str
    """Id of a parent span, which another program may have; empty without one."""
    name: str
    began_s: float
    ended_s: float
    attributes: dict[str, Attribute] = field(default_factory=dict)
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a waterfall."""

    span: Span
    depth: int


def waterfall(spans: Sequence[Span]) -> list[Row]:
    """Each span below its parent, siblings by their beginnings. One whose parent is not there is at the top."""
    known = {span.span_id for span in spans}
    children: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.began_s, span.span_id)):
        children.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)

    def below(parent_id: str, depth: int) -> Iterator[Row]:
        for span in children.get(parent_id, ()):
            yield Row(span, depth)
            yield from below(span.span_id, depth + 1)

    return list(below("", 0))


class Collector:
    """Has the spans that were sent to `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.spans: list[Span] = []

    def of_trace(self, trace_id: str) -> list[Span]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]


@contextmanager
def collector() -> Iterator[Collector]:
    """On a free port of loopback, for the length of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collected.spans += spans_of(self.rfile.read(int(self.headers["content-length"])))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Requests are not logged."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collected = Collector(f"http://127.0.0.1:{server.server_address[1]}/v1/traces")
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield collected
        finally:
            server.shutdown()


def spans_of(body: bytes) -> Iterator[Span]:
    request = ExportTraceServiceRequest.FromString(body)
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                    {each.key: value_of(each.value) for each in span.attributes},
                    span.status.code == span.status.STATUS_CODE_ERROR,
                )


def value_of(value: AnyValue) -> Attribute:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind in ("string_value", "int_value", "double_value", "bool_value") else str(value)
