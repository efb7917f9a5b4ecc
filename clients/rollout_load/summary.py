"""A run in numbers: what locust measured of requests, and what came of the rollouts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout_load.totals import LoadTotals

if TYPE_CHECKING:
    # Whoever imports locust has their sockets and threads changed to gevent's.
    from locust.stats import RequestStats, StatsEntry

FIRST_METHOD = "FIRST"
"""The type of an entry that is no request: the time to the first finished rollout of a stream."""
PUSH_METHOD = "PUSH"
DIGITS = 3


def entry_name(what: str, kind: str) -> str:
    """The name of an entry in locust's tables; `kind` is the class of its users."""
    return f"{what} ({kind})"


def kind_of_entry(name: str) -> str:
    return name.rpartition(" (")[2].removesuffix(")")


@dataclass(frozen=True, slots=True)
class Latency:
    """Requests of one entry, in seconds."""

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
    """Of the first finished rollout of streams; `None` without streams."""
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
        """As JSON, the last line of a run."""
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
    return {
        "requests": entry.requests,
        "failed": entry.failed,
        "p50_s": round(entry.p50_s, DIGITS),
        "p95_s": round(entry.p95_s, DIGITS),
    }


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
