"""The prefix cache of an engine whose front end is in this process."""

from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

HOST_MEMORY = "vllm:external_prefix_cache_hits"
"""Counts what is found there, when the engine begins to load it."""


def found_in_prefix_cache(counter: str = "vllm:prefix_cache_hits") -> int:
    """How many prompt tokens the engine has found there so far."""
    return next(
        metric.value for metric in get_metrics_snapshot() if isinstance(metric, Counter) and metric.name == counter
    )
