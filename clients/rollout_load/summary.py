"""Summary of a run: locust's figures of requests, outcomes of rollouts, and the bounds that were not kept.

It is shown as text, as a table in locust's HTML report, and as a line of JSON for programs. Importing it does not
import locust.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_load.options import FIRST, LoadLimits
from rollout_load.outcomes import LoadTotals

if TYPE_CHECKING:
    from locust.stats import RequestStats, StatsEntry

FIRST_METHOD = "FIRST"
"""Type of an entry that is not a request: the time to the first finished rollout of a stream."""
PUSH_METHOD = "PUSH"
DIGITS = 3


def entry_name(what: str, kind: str) -> str:
    """The name of an entry in locust's tables; `kind` is the class of its users."""
    return f"{what} ({kind})"


def kind_of_entry(name: str) -> str:
    return name.rpartition(" (")[2].removesuffix(")")


@dataclass(frozen=True, slots=True)
class Latency:
    """Count and latency of the requests of one entry."""

    requests: int
    failed: int
    p50_s: float
    p95_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The metrics of a run; rates are over the time from its start to its last answer."""

    seconds: float
    entries: dict[str, Latency]
    """By locust's name, such as `/rollout (groups)`."""
    first: Latency | None
    """Time to the first finished rollout of streams; `None` without streams."""
    totals: LoadTotals

    @property
    def requests(self) -> int:
        return sum(entry.requests for entry in self.entries.values())

    @property
    def failed(self) -> int:
        return sum(entry.failed for entry in self.entries.values())

    @property
    def error_rate(self) -> float:
        return self.failed / self.requests if self.requests else 0.0

    def rate(self, count: int) -> float:
        return count / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.rate(self.totals.tokens)

    @property
    def turns_per_s(self) -> float:
        return self.rate(self.totals.turns)

    def document(self) -> dict[str, Any]:
        """The last line of a run, as JSON."""
        totals = self.totals
        return {
            "seconds": round(self.seconds, DIGITS),
            "requests": self.requests,
            "failed": self.failed,
            "error_rate": round(self.error_rate, 2 * DIGITS),
            "rollouts": totals.rollouts,
            "rollouts_per_s": round(self.rate(totals.rollouts), DIGITS),
            "turns_per_s": round(self.turns_per_s, DIGITS),
            "tokens_per_s": round(self.tokens_per_s, DIGITS),
            "pushes": totals.pushes,
            "statuses": dict(sorted(totals.statuses.items())),
            "errors": dict(sorted(totals.errors.items())),
            "first_rollout": None if self.first is None else latency_document(self.first),
            "latency": {name: latency_document(entry) for name, entry in sorted(self.entries.items())},
            "tokens_last_quarter_over_first": totals.last_quarter_over_first(),
        }


def latency_document(entry: Latency) -> dict[str, float]:
    return {name: round(value, DIGITS) for name, value in asdict(entry).items()}


def summary_of(stats: "RequestStats", totals: LoadTotals) -> Summary:
    last = stats.last_request_timestamp
    first = [entry for (_, method), entry in stats.entries.items() if method == FIRST_METHOD]
    return Summary(
        seconds=max((last or stats.start_time) - stats.start_time, 0.0),
        entries={name: latency_of(entry) for (name, method), entry in stats.entries.items() if method != FIRST_METHOD},
        first=latency_of(first[0]) if first else None,
        totals=totals,
    )


def latency_of(entry: "StatsEntry") -> Latency:
    p50, p95 = (entry.get_response_time_percentile(share) / 1000 for share in (0.5, 0.95))
    return Latency(entry.num_requests, entry.num_failures, p50, p95)


WIDTH = 18


def rows_of(summary: Summary, broken: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Name and value of the figures that locust's own tables do not show."""
    totals = summary.totals
    rows = [
        ("Rollouts", f"{totals.rollouts}, {summary.rate(totals.rollouts):.1f} a second"),
        ("Statuses", counts(totals.statuses)),
        ("Turns a second", f"{summary.turns_per_s:.1f}"),
        ("Tokens a second", f"{summary.tokens_per_s:.1f}"),
        ("Errors by kind", counts(totals.errors)),
    ]
    if summary.first is not None:
        rows.append(("First rollout", f"p50 {summary.first.p50_s:.2f} s, p95 {summary.first.p95_s:.2f} s"))
    if totals.pushes:
        rows.append(("Pushes", str(totals.pushes)))
    if (held := totals.last_quarter_over_first()) is not None:
        rows.append(("Held", f"the last quarter had {held:.2f} of the tokens of the first"))
    return rows + [("Not kept", sentence) for sentence in broken]


def counts(by_name: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(by_name.items())) or "none"


def text_of(summary: Summary, broken: list[str]) -> str:
    return "".join(f"{name:<{WIDTH}}{value}\n" for name, value in rows_of(summary, broken))


def line_of(summary: Summary, broken: list[str], exit_code: int) -> str:
    return json.dumps(summary.document() | {"broken": broken, "exit_code": exit_code})


def add_to_html(path: Path, summary: Summary, broken: list[str]) -> None:
    """Adds the rows to the report that locust has written."""
    cells = "".join(
        f"<tr><th align='left'>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in rows_of(summary, broken)
    )
    table = f"<section style='padding: 2em; font-family: sans-serif'><h2>Rollouts</h2><table>{cells}</table></section>"
    html = path.read_text(encoding="utf-8")
    head, body, tail = html.rpartition("</body>")
    path.write_text(f"{head}{table}{body}{tail}" if body else f"{html}{table}", encoding="utf-8")


def broken_limits(summary: Summary, limits: LoadLimits) -> list[str]:
    """A sentence for each bound that was not kept. A run without requests fails whatever the bounds are."""
    if not summary.requests:
        return ["No request was answered."]
    return [*broken_rates(summary, limits), *broken_latencies(summary, limits)]


def broken_rates(summary: Summary, limits: LoadLimits) -> Iterator[str]:
    if summary.error_rate > limits.max_error_rate:
        yield f"{summary.error_rate:.2%} of the requests failed; {limits.max_error_rate:.2%} may."
    least = {
        "tokens": (summary.tokens_per_s, limits.min_tokens_per_s),
        "turns": (summary.turns_per_s, limits.min_turns_per_s),
    }
    for what, (rate, bound) in least.items():
        if bound is not None and rate < bound:
            yield f"There were {rate:.1f} {what} a second; {bound:g} are wanted."


def broken_latencies(summary: Summary, limits: LoadLimits) -> Iterator[str]:
    measured = {name: (kind_of_entry(name), entry.p95_s) for name, entry in summary.entries.items()}
    if summary.first is not None:
        measured["The first finished rollout of a stream"] = (FIRST, summary.first.p95_s)
    for name, (kind, p95_s) in measured.items():
        # The bound for all classes applies to whole requests.
        bound = limits.max_p95_s.get(kind, None if kind == FIRST else limits.max_p95_s.get(""))
        if bound is not None and p95_s > bound:
            yield f"{name}: the p95 is {p95_s:.3f} s; {bound:g} s are allowed."
