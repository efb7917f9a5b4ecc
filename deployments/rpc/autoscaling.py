"""Autoscaling by the generations or steps in progress. Serve's own policy counts calls, and one call carries many.

The settings of a Serve config (`target_ongoing_requests`, delays, bounds) keep their meaning, per generation or step.
"""

from typing import Any

from ray.serve.config import AutoscalingContext

IN_PROGRESS = "in_progress"


def stats_of(in_progress: int) -> dict[str, float]:
    """The result of a replica's `record_autoscaling_stats`."""
    return {IN_PROGRESS: float(in_progress)}


def by_requests_in_progress(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """The number of replicas that have `target_ongoing_requests` in progress each; the `policy_function` of a config.

    The number stays as it is while no replica has reported.
    """
    by_replica = (context.aggregated_metrics or {}).get(IN_PROGRESS)
    if not by_replica or context.config is None:
        return context.target_num_replicas, {}
    return sum(by_replica.values()) / context.config.get_target_ongoing_requests(), {}
