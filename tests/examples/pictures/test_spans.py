"""The picture of a trace: spans as a collector gets them, their order, what is drawn."""

from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Status, StatusCode

from examples.pictures.spans import Row, Span, collector, waterfall
from examples.pictures.trace import color_of, draw, label_of

TRACE = "0af7651916cd43dd8448eb211c80319c"


def span(name: str, span_id: str, parent_id: str, began_s: float, ended_s: float, **attributes: int) -> Span:
    return Span(TRACE, span_id, parent_id, name, began_s, ended_s, dict(attributes))


@pytest.mark.slow
def test_the_collector_has_the_spans_that_an_exporter_sends() -> None:
    with collector() as collected:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=collected.endpoint)))
        tracer = provider.get_tracer("test")
        with (
            tracer.start_as_current_span("rollout", attributes={"rollout.sample": 3}) as outer,
            tracer.start_as_current_span("turn") as inner,
        ):
            inner.set_status(Status(StatusCode.ERROR))
        trace_id = format(outer.get_span_context().trace_id, "032x")
        turn, rollout = collected.of_trace(trace_id)
    assert (rollout.name, rollout.parent_id, rollout.attributes, rollout.failed) == (
        "rollout",
        "",
        {"rollout.sample": 3},
        False,
    )
    assert (turn.name, turn.parent_id, turn.failed) == ("turn", rollout.span_id, True)
    assert rollout.began_s <= turn.began_s <= turn.ended_s <= rollout.ended_s


def test_spans_stand_below_their_parents_in_the_order_of_their_beginnings() -> None:
    spans = [
        span("step", "d", "b", 3, 4),
        span("turn", "b", "a", 1, 4),
        span("POST /rollout", "a", "of-a-trainer", 0, 9),
        span("generate", "c", "b", 1, 3),
        span("turn", "e", "a", 4, 9),
    ]
    assert [(row.depth, row.span.span_id) for row in waterfall(spans)] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
        (2, "d"),
        (1, "e"),
    ]


@pytest.mark.slow
def test_the_picture_names_each_span_with_its_length_and_is_the_same_each_time(tmp_path: Path) -> None:
    rows = [
        Row(Span(TRACE, "a", "", "POST /rollout", 5.0, 5.02, {"http.request.method": "POST"}), 0),
        Row(span("rollout", "b", "a", 5.001, 5.015, **{"rollout.generation_index": 1}), 1),
    ]
    draw(rows, tmp_path / "a.svg")
    draw(rows, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    for expected in ("POST /rollout", "20.0 ms", "rollout 1", "14.0 ms"):
        assert expected in text


def test_a_failed_or_unknown_span_is_told_by_its_name_and_color() -> None:
    assert label_of(Row(span("turn", "a", "", 0, 1), 2)) == "    turn"
    assert color_of(span("an environment's own", "a", "", 0, 1)) == "#a6a6a6"
