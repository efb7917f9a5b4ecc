"""The prefix cache of an engine whose front end is in this process."""

from vllm.v1.metrics.reader import Counter, get_metrics_snapshot


def found_in_prefix_cache() -> int:
    """How many prompt tokens the engine has found there so far."""
    return next(
        metric.value
        for metric in get_metrics_snapshot()
        if isinstance(metric, Counter) and metric.name == "vllm:prefix_cache_hits"
    )
