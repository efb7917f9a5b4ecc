"""Starts the service and a Prometheus, puts a short load on it, and draws the main panels of the dashboard.

    python -m examples.pictures.dashboard --output dashboard.png

Queries, titles and legends are those of `docker/observability/grafana/dashboards/rollout.json`, which Grafana shows.
The load has three equal parts: few rollouts, many, and many while new weights are pushed. Needs Debian's `prometheus`.
Times are in seconds.
"""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import matplotlib.pyplot as plt
import typer
from matplotlib.axes import Axes
from rich.console import Console

from examples.pictures.prometheus import Line, PrometheusMissing, lines_of, prometheus
from rollout_client import RolloutClient
from rollout_client.contract.rollouts import Sampling
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service, sentences_for_the_user

REPOSITORY = Path(__file__).resolve().parents[2]
DASHBOARD = REPOSITORY / "docker" / "observability" / "grafana" / "dashboards" / "rollout.json"
WEIGHTS = REPOSITORY / "models" / "tiny" / "model.safetensors"
DRAWN = (2, 3, 4, 7, 9, 10, 15, 17, 19, 21, 24, 26)
"""Ids of panels."""
TASKS = ("math", "sliding_puzzle")
SAMPLING = Sampling(max_new_tokens=24)
FEW, MANY = 2, 16
"""Samples of a request; each is a group of eight."""
GENERATIONS = 8
TURNS = 3
PUSH_EVERY_S = 8.0
SCRAPED_EVERY_S = 1
RATE_INTERVAL_S = 10
"""In place of what Grafana computes."""
PLACEHOLDER = "$__rate_interval"
PERCENT = 100
COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    targets: list[tuple[str, str]]
    """Query and legend each."""


def main(
    config: Annotated[Path, typer.Argument(help="Serve config of the service to start.")] = Path(
        "serve_config.cpu.yaml"
    ),
    output: Annotated[Path, typer.Option(help="An SVG or PNG.")] = Path("dashboard.png"),
    seconds: Annotated[int, typer.Option(min=15, help="Length of the load.")] = 75,
) -> None:
    console = Console()
    # Metrics reach Ray's exporters every second, not every ten: the load is short.
    os.environ.update(RAY_metrics_report_interval_ms="1000")
    with (
        sentences_for_the_user(console),
        TemporaryDirectory() as folder,
        local_service(read_config(config, port=free_port()), console) as url,
    ):
        try:
            with prometheus(url, Path(folder), f"{SCRAPED_EVERY_S}s") as address:
                # Before that a rate has no whole interval.
                begin_s = time.time() + RATE_INTERVAL_S
                put_under_load(url, seconds)
                drawn = [(panel, lines_of_panel(address, panel, begin_s, time.time())) for panel in panels()]
        except PrometheusMissing as error:
            console.print(str(error), style="red")
            raise typer.Exit(1) from error
    draw(drawn, output)
    console.print(f"The picture is in {output}.")


def panels() -> list[Panel]:
    """Those of the dashboard that are drawn, in its order."""
    return [panel_of(panel) for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["id"] in DRAWN]


def panel_of(panel: Mapping[str, Any]) -> Panel:
    targets = [
        (target["expr"].replace(PLACEHOLDER, f"{RATE_INTERVAL_S}s"), target["legendFormat"])
        for target in panel["targets"]
    ]
    return Panel(panel["title"], panel["fieldConfig"]["defaults"]["unit"], targets)


def put_under_load(url: str, seconds: float) -> None:
    """Two callers, one a task, and in the last third a trainer that pushes weights."""
    began = time.monotonic()

    def play(task: str) -> None:
        seed = 0
        with RolloutClient(url) as client:
            while (passed := time.monotonic() - began) < seconds:
                seed += 1
                samples = client.example_samples(task, FEW if passed < seconds / 3 else MANY, seed=seed)
                client.rollout(samples, num_generations=GENERATIONS, sampling=SAMPLING, max_rollout_turns=TURNS)

    def push() -> None:
        with RolloutClient(url) as client:
            time.sleep(seconds * 2 / 3)
            while time.monotonic() - began < seconds - PUSH_EVERY_S:
                client.push_weights(WEIGHTS)
                time.sleep(PUSH_EVERY_S)

    with ThreadPoolExecutor() as callers:
        for done in [*(callers.submit(play, task) for task in TASKS), callers.submit(push)]:
            done.result()


def lines_of_panel(address: str, panel: Panel, begin_s: float, end_s: float) -> list[tuple[str, Line]]:
    """Each line with its legend."""
    return [
        (legend_of(template, line.labels), line)
        for query, template in panel.targets
        for line in lines_of(address, query, begin_s, end_s, SCRAPED_EVERY_S)
    ]


def legend_of(template: str, labels: Mapping[str, str]) -> str:
    """As Grafana writes it: `{{task_name}}` is the value of that label."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), template).strip()


def draw(drawn: Sequence[tuple[Panel, Sequence[tuple[str, Line]]]], path: Path) -> None:
    rows = -(-len(drawn) // COLUMNS)
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dashboard"})
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(4.2 * COLUMNS, 2.8 * rows), layout="constrained", squeeze=False)
    began_s = min((line.times_s[0] for _, lines in drawn for _, line in lines), default=0.0)
    for axes, (panel, lines) in zip(grid.flat, drawn, strict=False):
        draw_panel(axes, panel, lines, began_s)
    for axes in grid.flat[len(drawn) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def draw_panel(axes: Axes, panel: Panel, lines: Sequence[tuple[str, Line]], began_s: float) -> None:
    factor = PERCENT if panel.unit == "percentunit" else 1
    for legend, line in lines:
        seconds = [at_s - began_s for at_s in line.times_s]
        axes.plot(seconds, [value * factor for value in line.values], label=legend, linewidth=1.4)
    axes.set_title(panel.title, loc="left", size=10)
    axes.set_ylabel(UNITS.get(panel.unit, ""), size=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if any(legend for legend, _ in lines):
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False)


UNITS = {"ops": "a second", "reqps": "a second", "s": "seconds", "percentunit": "%"}


if __name__ == "__main__":
    typer.run(main)
