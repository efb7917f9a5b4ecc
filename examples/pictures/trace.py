"""Starts the service with tracing, plays one request, and draws the spans of it as a waterfall.

    python -m examples.pictures.trace --output trace.svg

A collector of its own takes the spans, in place of Jaeger or Tempo.
"""

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer
from matplotlib.patches import Patch
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from examples.pictures.spans import Collector, Row, Span, collector, waterfall
from rollout_client import RolloutClient
from rollout_client.contract.rollouts import Sampling
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service, sentences_for_the_user

TASK = "sliding_puzzle"
TURNS = 3
GENERATIONS = 2
SAMPLING = Sampling(max_new_tokens=16)
SHOWN_WITHIN_S = 40.0
SENT_EVERY_S = 6.0
"""Each process sends its spans every five seconds."""
COLORS = {
    "request": "#44546a",
    "rollout": "#4472c4",
    "turn": "#9dc3e6",
    "generate": "#ed7d31",
    "llm_request": "#f8cbad",
    "step": "#70ad47",
    "agent": "#7030a0",
}
LEGEND = {"llm_request": "llm_request (vLLM)"}
FAILED = "#c00000"
LABELS_WIDTH = 115
"""Points of the names at the left."""
ROOM_FOR_TEXT = 1.07


def main(
    config: Annotated[Path, typer.Argument(help="Serve config of the service to start.")] = Path(
        "serve_config.cpu.yaml"
    ),
    output: Annotated[Path, typer.Option(help="An SVG or PNG.")] = Path("trace.svg"),
) -> None:
    console = Console()
    with sentences_for_the_user(console), collector() as collected:
        with local_service(traced(read_config(config, port=free_port()), collected.endpoint), console) as url:
            spans = spans_of_one_request(url, collected)
        rows = waterfall(spans)
        draw(rows, output)
    console.print(f"{len(rows)} spans are in {output}.")


def traced(config: ServeDeploySchema, endpoint: str) -> ServeDeploySchema:
    """With vLLM's own spans too."""
    [application] = config.applications
    application.args["tracing"] = {"endpoint": endpoint}
    engine = application.args["engine"]
    engine["otlp_traces_endpoint"] = endpoint
    # vLLM speaks gRPC to collectors otherwise.
    engine["environment_variables"] |= {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    return config


def spans_of_one_request(url: str, collected: Collector) -> list[Span]:
    """The trace of the second request: the first is slower."""
    with RolloutClient(url) as client:
        samples = client.example_samples(TASK, 1, seed=7)
        client.rollout(samples, num_generations=GENERATIONS, sampling=SAMPLING, max_rollout_turns=TURNS)
    trace_id = secrets.token_hex(16)
    # A trainer that traces its own steps sends their span: the service's are below it.
    parent = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    with RolloutClient(url, headers=parent) as client:
        client.rollout(samples, num_generations=GENERATIONS, sampling=SAMPLING, max_rollout_turns=TURNS)
    ends_at = time.monotonic() + SHOWN_WITHIN_S
    while not any(span.name.startswith("POST") for span in collected.of_trace(trace_id)):
        if time.monotonic() > ends_at:
            raise TimeoutError(f"No span of the request has come within {SHOWN_WITHIN_S:g} s.")
        time.sleep(0.5)
    time.sleep(SENT_EVERY_S)
    return collected.of_trace(trace_id)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Text of an SVG stays text, and the same rows make the same file."""
    began_s = min(row.span.began_s for row in rows)
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "trace"})
    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.22 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        span = row.span
        start_ms, length_ms = (span.began_s - began_s) * 1e3, (span.ended_s - span.began_s) * 1e3
        axes.barh(place, length_ms, left=start_ms, height=0.7, color=FAILED if span.failed else color_of(span))
        axes.annotate(
            f"{length_ms:.1f} ms",
            (start_ms + length_ms, place),
            (3, 0),
            textcoords="offset points",
            va="center",
            size=7,
        )
    axes.set_yticks(range(len(rows)), [label_of(row) for row in rows], family="monospace", size=8)
    for label in axes.get_yticklabels():
        label.set_horizontalalignment("left")
    axes.tick_params(axis="y", pad=LABELS_WIDTH, length=0)
    whole_ms = max(row.span.ended_s - began_s for row in rows) * 1e3
    axes.set(xlabel="ms since the request began", xlim=(0, whole_ms * ROOM_FOR_TEXT), ylim=(len(rows) - 0.5, -0.5))
    axes.grid(axis="x", alpha=0.3)
    names = dict.fromkeys(kind_of(row.span) for row in rows)
    handles = [Patch(color=COLORS[name], label=LEGEND.get(name, name)) for name in names if name in COLORS]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8, frameon=False)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def kind_of(span: Span) -> str:
    return "request" if "http.request.method" in span.attributes else span.name


def color_of(span: Span) -> str:
    return COLORS.get(kind_of(span), "#a6a6a6")


def label_of(row: Row) -> str:
    generation = row.span.attributes.get("rollout.generation_index")
    number = f" {generation}" if row.span.name == "rollout" and generation is not None else ""
    return f"{'  ' * row.depth}{row.span.name}{number}"


if __name__ == "__main__":
    typer.run(main)
