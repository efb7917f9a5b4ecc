"""What metrics, tracing and records of rollouts cost in throughput: `make bench-observability`.

The same rollouts are played by two services in alternating rounds: one with metrics, as they are by default, records of
rollouts, and traces, which go to a collector in this process; and one without all three. While one plays, the other is
suspended. Both have the embedded model, the workloads of `make bench`, and its environment that only answers.

The last line of stdout is JSON. The exit code is 1 if the service with all has less than 0.98 of the throughput of
the one without, by the geometric mean over the workloads.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import sqrt
from pathlib import Path
from statistics import fmean, geometric_mean, median
from threading import Thread
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from benchmarks.engine_comparison import Contender, Rounds, medians, play_rounds, rollout_service, rounded, service_play
from benchmarks.process_group import no_process_left
from benchmarks.reporting import finish
from benchmarks.workload import WORKLOADS
from rollout_client import RolloutClient

WAYS = {"off": "without metrics, tracing and records", "on": "with all three"}
LEAST_RATIO = 0.98
console = Console(stderr=True)


class Collector(BaseHTTPRequestHandler):
    """Takes traces by OTLP and forgets them. `received_bytes` says how much came."""

    received_bytes = 0

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length", 0))
        self.rfile.read(size)
        type(self).received_bytes += size
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """A line for each request would be in the way."""


@contextmanager
def collector() -> Iterator[str]:
    """Yields its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        server.server_close()


def configs(served: dict[str, Any], endpoint: str, sample_rate: float) -> dict[str, dict[str, Any]]:
    """By way. Args: `sample_rate` is the share of requests that are traced; 0 for what the others cost."""
    tracing = {"endpoint": endpoint, "sample_rate": sample_rate} if sample_rate else None
    observed = {
        "off": {"metrics": False, "tracing": None, "rollout_records": None},
        "on": {"metrics": True, "tracing": tracing, "rollout_records": {}},
    }
    found = {}
    for way, settings in observed.items():
        found[way] = deepcopy(served)
        found[way]["applications"][0]["args"] |= settings
    return found


@contextmanager
def contenders(served: dict[str, Any], folder: Path, sample_rate: float) -> Iterator[dict[str, Contender]]:
    with ExitStack() as stack:
        ways: dict[str, Contender] = {}
        for way, config in configs(served, stack.enter_context(collector()), sample_rate).items():
            with console.status(f"Starting the service {WAYS[way]}"):
                url, processes = stack.enter_context(rollout_service(config, folder))
            ways[way] = Contender(service_play(stack.enter_context(RolloutClient(url))), processes)
            processes.suspend()
        yield ways


def figures_of(measured: Rounds) -> dict[str, Any]:
    """The ratios are of neighbouring rounds, whose median counts: a machine that slows down slows both."""
    pairs = {
        workload.name: [off.seconds / on.seconds for off, on in zip(ways["off"], ways["on"], strict=True)]
        for workload, ways in measured.items()
    }
    ratios = {name: median(of_workload) for name, of_workload in pairs.items()}
    processor_ms = medians(measured, lambda workload, round_: 1000 * round_.processor_seconds / workload.all_turns)
    return {
        "throughput_ratios": rounded(ratios),
        "geometric_mean": round(geometric_mean(ratios.values()), 3),
        "standard_error": standard_error(list(pairs.values())),
        "processor_ms_per_turn": {name: rounded(values) for name, values in processor_ms.items()},
        "kilobytes_of_traces": Collector.received_bytes // 1000,
    }


def standard_error(ratios: Sequence[Sequence[float]]) -> float | None:
    """How far chance alone moves a mean of all ratios. `None` without two rounds of a workload.

    Args: `ratios` of the rounds of each workload; how workloads differ from each other is no chance.
    """
    count = sum(map(len, ratios))
    if (free := count - len(ratios)) <= 0:
        return None
    squares = sum((ratio - fmean(of_workload)) ** 2 for of_workload in ratios for ratio in of_workload)
    return round(sqrt(squares / free / count), 3)


def missed(figures: dict[str, Any], sample_rate: float) -> list[str]:
    """The bounds that do not hold, in words."""
    ratio = figures["geometric_mean"]
    what = "metrics, tracing and records" if sample_rate else "metrics and records"
    slow = f"with {what} the service has {ratio:g} of its throughput, less than {LEAST_RATIO:g}"
    untraced = "no trace has come in"
    return [slow] * (ratio < LEAST_RATIO) + [untraced] * (sample_rate == 1 and not figures["kilobytes_of_traces"])


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    rounds: Annotated[int, typer.Option(min=1)] = 12,
    only: Annotated[list[str] | None, typer.Option(help="Names of workloads, such as 64x4x32.")] = None,
    sample_rate: Annotated[float, typer.Option(min=0, max=1, help="Of requests that are traced; 0: no tracing.")] = 1.0,
) -> None:
    served = yaml.safe_load(config.read_text())
    workloads = [workload for workload in WORKLOADS if not only or workload.name in only]
    with no_process_left(), contenders(served, config.parent, sample_rate) as ways:
        measured = play_rounds(ways, workloads, rounds, WAYS)
        console.print("Stopping")
    figures = figures_of(measured)
    finish(console, missed(figures, sample_rate), {**figures, "load_average": round(os.getloadavg()[1], 1)})


if __name__ == "__main__":
    typer.run(main)
