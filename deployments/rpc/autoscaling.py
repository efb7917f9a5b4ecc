"""How many replicas: by the generations or steps under way, of which one call carries many.

Serve's own policy counts calls; `target_ongoing_requests`, the delays and the bounds of the config mean the same here.
"""

from typing import Any

from ray.serve.config import AutoscalingContext

UNDER_WAY = "under_way"


def stats_of(under_way: int) -> dict[str, float]:
    """What a replica's `record_autoscaling_stats` answers."""
    return {UNDER_WAY: float(under_way)}


def by_requests_in_progress(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """As many replicas as carry it with `target_ongoing_requests` each; the `policy_function` of a Serve config."""
    by_replica = (context.aggregated_metrics or {}).get(UNDER_WAY)
    if not by_replica or context.config is None:
        return context.target_num_replicas, {}
    return sum(by_replica.values()) / context.config.get_target_ongoing_requests(), {}
