"""Those metrics of `GET /metrics` that `rollout top` shows, read from Prometheus' text format. No I/O.

What each one is: docs/operating.md. Ray writes `ray_` before each name; here it is left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollout_client.optional_dependencies import needed_for

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
