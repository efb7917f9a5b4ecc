"""The metrics of `GET /metrics` that `rollout top` shows, and how fast its counters grow. No I/O, no clock.

They are read from Prometheus' text format; docs/operating.md describes each. Ray writes `ray_` before each name; here
it is left out.

Guarantees of `Rates`:

- A rate is what was added between two readings by the seconds between them. It is never below 0.
- A process that starts anew begins at 0: a counter that fell has grown by its new value.
- A series that is missing in a reading and comes back counts what it grew meanwhile, once.
- A series that appears after the first reading is of a new process: all of its value was added since.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rollout_client.errors import needed_for

RAY = "ray_"
COUNTERS = frozenset(
    {
        "rollout_rollouts_total",
        "rollout_turns_total",
        "rollout_clipped_turns_total",
        "rollout_tokens_total",
        "rollout_failed_calls_total",
        "rollout_reward_sums_total",
        "rollout_reward_count",
        "vllm_generation_tokens_total",
        "vllm_prefix_cache_queries_total",
        "vllm_prefix_cache_hits_total",
    }
)
"""Each only grows while its process lives; a process that starts anew begins at 0."""
GAUGES = frozenset(
    {
        "rollout_in_flight",
        "rollout_waiting_generations",
        "rollout_policy_version",
        "rollout_policy_age_seconds",
        "serve_deployment_replica_healthy",
        "vllm_kv_cache_usage_perc",
        "vllm_num_requests_running",
        "vllm_num_requests_waiting",
    }
)
SHOWN = COUNTERS | GAUGES


@dataclass(frozen=True, slots=True)
class Series:
    """One line of metrics: a name with labels."""

    name: str
    labels: tuple[tuple[str, str], ...]
    """In the order of their names."""

    def label(self, name: str) -> str:
        """Empty where it has none of that name, as Prometheus has it."""
        return dict(self.labels).get(name, "")


Values = Mapping[Series, float]


def values_of(text: str) -> dict[Series, float]:
    """The value of each series of `SHOWN`.

    Raises:
        ValueError: a line of one of them is none of the format.
        ModuleNotFoundError: without prometheus_client, which the extra `cli` brings.
    """
    with needed_for("rollout top", "cli"):
        from prometheus_client.parser import text_string_to_metric_families

    wanted = "\n".join(lines_of(text, SHOWN))
    # Without its heading a series is a family of its own, under its whole name.
    families = text_string_to_metric_families(wanted)
    return {
        Series(sample.name.removeprefix(RAY), tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def lines_of(text: str, names: frozenset[str]) -> Iterator[str]:
    """The page has thousands of lines, most of them of histograms: only those that are wanted are parsed."""
    for line in text.splitlines():
        if line.startswith(RAY) and line.split("{", 1)[0].split(" ", 1)[0].removeprefix(RAY) in names:
            yield line


FORGOTTEN_AFTER_S = 600.0
"""A series that was away for so long is of a replica that has ended."""


class LastValue(NamedTuple):
    value: float
    at_s: float


class Rates:
    """Rates of the counters over a sliding window.

    Args:
        window_s: seconds of which rates are means; fewer before the first reading is as old. A service's counters stand
            still for up to ten seconds and then jump: a window shorter than that shows nothing, then too much.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._last: dict[Series, LastValue] = {}
        self._grown: dict[Series, float] = {}
        """Since the first reading."""
        self._readings: deque[tuple[float, dict[Series, float]]] = deque()
        """Time and `_grown` of each reading of the window."""

    def take(self, at_s: float, counters: Values) -> None:
        """Adds a reading; `at_s` is later than that of the reading before."""
        is_first = not self._readings
        for series, value in counters.items():
            before = value if is_first else self._last.get(series, LastValue(0.0, at_s)).value
            growth = value - before if value >= before else value
            self._grown[series] = self._grown.get(series, 0.0) + growth
            self._last[series] = LastValue(value, at_s)
        for series in [series for series, last in self._last.items() if at_s - last.at_s > FORGOTTEN_AFTER_S]:
            del self._last[series], self._grown[series]
        self._readings.append((at_s, dict(self._grown)))
        while len(self._readings) > 2 and self._readings[1][0] <= at_s - self._window_s:
            self._readings.popleft()

    @property
    def span_s(self) -> float | None:
        """Seconds that the rates are of; `None` before the second reading."""
        if len(self._readings) < 2:
            return None
        return self._readings[-1][0] - self._readings[0][0]

    def rate(self, name: str, **labels: str) -> float | None:
        """The growth a second of all series of that name with these labels together.

        `None` if there is none, or no second reading.
        """
        return self._by(None, name, labels).get("")

    def by_label(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The same for each value of `label`, as far as it is known."""
        return self._by(label, name, labels)

    def _by(self, label: str | None, name: str, labels: dict[str, str]) -> dict[str, float]:
        span_s = self.span_s
        if span_s is None:
            return {}
        (_, then), (_, now) = self._readings[0], self._readings[-1]
        found: dict[str, float] = {}
        for series, grown in now.items():
            if series.name == name and labels.items() <= dict(series.labels).items():
                key = "" if label is None else series.label(label)
                found[key] = found.get(key, 0.0) + (grown - then.get(series, 0.0)) / span_s
        return found
