"""Options of a load test, what its users count, and the report at its end, on one machine or many.

Each process counts what its users do. Workers send their counts with their reports, and the master adds them up.
"""

import json
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from locust import events
from locust.env import Environment
from locust.runners import WorkerRunner
from locust.stats import RequestStats, StatsEntry

from rollout_client import SampleResult

FIRST = "FIRST"
"""Type of the entries with the time to the first finished rollout of a stream: no requests."""
DEFAULT_CLASSES = "interactive=3,groups,multi-turn,streaming"
OPTIONS: dict[str, tuple[Any, str]] = {
    "classes": (DEFAULT_CLASSES, "Who calls, with shares; agent and pusher are the others"),
    "tasks": ("", "Tasks to play, by commas; by default all of the service"),
    "group-size": (8, "Rollouts of a sample of the classes groups and streaming"),
    "batch-samples": (4, "Samples in a request of these classes"),
    "max-new-tokens": (32, "Longest generation, in tokens"),
    "max-turns": (4, "Most turns of a rollout, but for the class multi-turn"),
    "long-turns": (16, "Most turns of a rollout of the class multi-turn"),
    "agent-calls": (3, "Calls of chat completions in a session of the class agent"),
    "push-weights": ("", "What the class pusher pushes: a .safetensors file or a folder of them"),
    "push-every-s": (10.0, "Seconds between two pushes"),
    "max-error-rate": (0.01, "Share of failed requests above which the exit code is 1"),
    "max-p95-s": (0.0, "Longest p95 of the requests of a class; 0: any"),
    "min-tokens-per-s": (0.0, "Generated tokens a second below which the exit code is 1"),
}
"""Default and help of each. An environment variable such as LOAD_MAX_TURNS sets one, too."""


class LoadTotals:
    """Counts since the run began, or of a worker since its last report to the master."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.counts, self.statuses, self.errors = Counter[str](), Counter[str](), Counter[str]()

    def add(self, sample: SampleResult) -> None:
        self.count(turns=sample.metrics.turn_count, tokens=sample.metrics.assistant_tokens)
        self.count(rollouts=sample.error is None)
        self.statuses[sample.status] += 1

    def count(self, **counts: int) -> None:
        self.counts.update(counts)

    def message(self) -> dict[str, dict[str, int]]:
        return {name: dict(counter) for name, counter in vars(self).items()}

    def merge(self, message: dict[str, dict[str, int]]) -> None:
        for name, counter in vars(self).items():
            counter.update(message[name])


TOTALS = LoadTotals()


def add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Rollouts", "Who calls, with what, and what makes the run fail")
    for name, (default, text) in OPTIONS.items():
        variable: Any = {"env_var": f"LOAD_{name.replace('-', '_').upper()}"}  # Of configargparse, which locust takes.
        group.add_argument(f"--{name}", default=default, type=type(default), help=text, **variable)


def shares(text: str, classes: Iterable[str]) -> dict[str, int]:
    """Shares by class, from `interactive=3,groups`; the default share is 1."""
    given = {name: int(share or 1) for name, _, share in (part.strip().partition("=") for part in text.split(","))}
    if unknown := given.keys() - set(classes):
        raise SystemExit(f"There is no class {', '.join(sorted(unknown))}; there are {', '.join(classes)}.")
    return given


def document_of(stats: RequestStats) -> dict[str, Any]:
    """The figures of a trainer, which locust's own tables do not show."""
    seconds = max((stats.last_request_timestamp or stats.start_time) - stats.start_time, 1e-9)
    counts = TOTALS.counts
    rates = {f"{name}_per_s": round(counts[name] / seconds, 3) for name in ("rollouts", "turns", "tokens")}
    requests = [entry for (_, method), entry in stats.entries.items() if method != FIRST]
    firsts = [entry for (_, method), entry in stats.entries.items() if method == FIRST]
    return {
        "seconds": round(seconds, 3),
        "requests": sum(entry.num_requests for entry in requests),
        "failures": sum(entry.num_failures for entry in requests),
        "rollouts": counts["rollouts"],
        "pushes": counts["pushes"],
        **rates,
        "statuses": dict(sorted(TOTALS.statuses.items())),
        "errors": dict(sorted(TOTALS.errors.items())),
        "first_rollout": latency_of(firsts[0]) if firsts else None,
        "latency": {entry.name: latency_of(entry) for entry in requests},
    }


def latency_of(entry: StatsEntry) -> dict[str, float]:
    p50, p95 = (entry.get_response_time_percentile(share) / 1000 for share in (0.5, 0.95))
    return {"requests": entry.num_requests, "p50_s": round(p50, 3), "p95_s": round(p95, 3)}


def broken_bounds(document: dict[str, Any], given: Any) -> Iterator[str]:
    """A sentence for each bound that was not kept. A run without requests fails whatever the bounds are."""
    if not document["requests"]:
        yield "No request was answered."
        return
    if (rate := document["failures"] / document["requests"]) > given.max_error_rate:
        yield f"{rate:.2%} of the requests failed; {given.max_error_rate:.2%} may."
    if document["tokens_per_s"] < given.min_tokens_per_s:
        yield f"There were {document['tokens_per_s']:.1f} tokens a second; {given.min_tokens_per_s:g} are wanted."
    for name, latency in document["latency"].items():
        if 0 < given.max_p95_s < latency["p95_s"]:
            yield f"{name}: the p95 is {latency['p95_s']:.3f} s; {given.max_p95_s:g} s are allowed."


def end(environment: Environment, **_: Any) -> None:
    """Sets the exit code, and has the report printed after locust's own."""
    if isinstance(environment.runner, WorkerRunner):
        return

    def show(exit_code: int, **_: Any) -> None:
        # Measured anew: requests have ended since the exit code was set.
        document = document_of(environment.stats)
        document |= {"broken": [*broken_bounds(document, environment.parsed_options)], "exit_code": exit_code}
        shown = {name: value for name, value in document.items() if name != "latency"}
        sys.stdout.write("".join(f"{name:<18}{value}\n" for name, value in shown.items()))
        sys.stdout.write(f"{json.dumps(document)}\n")
        sys.stdout.flush()

    broken = any(broken_bounds(document_of(environment.stats), environment.parsed_options))
    environment.process_exit_code = int(broken)
    environment.events.quit.add_listener(show)


def report(data: dict[str, Any], **_: Any) -> None:
    data["rollouts"] = TOTALS.message()
    TOTALS.clear()


def take_report(data: dict[str, Any], **_: Any) -> None:
    if "rollouts" in data:
        TOTALS.merge(data["rollouts"])


def connect() -> None:
    """Called once, by the locustfile."""
    events.init_command_line_parser.add_listener(add_arguments)
    events.test_start.add_listener(lambda **_: TOTALS.clear())
    events.report_to_master.add_listener(report)
    events.worker_report.add_listener(take_report)
    events.quitting.add_listener(end)
