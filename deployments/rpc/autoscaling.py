"""Autoscaling by the generations or steps in progress. Serve's own policy counts calls, and one call carries many.

The settings of a Serve config (`target_ongoing_requests`, delays, bounds) keep their meaning, per generation or step.
"""

from typing import Any

from ray.serve.config import AutoscalingContext

IN_PROGRESS, AT_ONCE = "in_progress", "at_once"
FULL_SHARE = 0.75
"""Share of what an engine runs at once, above which another replica is started: that takes minutes."""


def stats_of(in_progress: int, at_once: int | None = None) -> dict[str, float]:
    """The result of a replica's `record_autoscaling_stats`.

    Args:
        at_once: how many it works on at once; `None` if it has no such number.
    """
    return {IN_PROGRESS: float(in_progress)} | ({} if at_once is None else {AT_ONCE: float(at_once)})


def by_engine_size(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """The number of replicas whose engines are three quarters full; the `policy_function` of generators.

    What an engine runs at once is its own `max_num_seqs`, so that no number of the config has to follow the card. For
    replicas that report none it is `by_requests_in_progress`.
    """
    metrics = context.aggregated_metrics or {}
    in_progress, at_once = metrics.get(IN_PROGRESS), metrics.get(AT_ONCE)
    if not in_progress or not at_once:
        return by_requests_in_progress(context)
    return sum(in_progress.values()) / (FULL_SHARE * min(at_once.values())), {}


def by_requests_in_progress(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """The number of replicas that have `target_ongoing_requests` in progress each; the `policy_function` of a config.

    The number stays as it is while no replica has reported.
    """
    by_replica = (context.aggregated_metrics or {}).get(IN_PROGRESS)
    if not by_replica or context.config is None:
        return context.target_num_replicas, {}
    return sum(by_replica.values()) / context.config.get_target_ongoing_requests(), {}
