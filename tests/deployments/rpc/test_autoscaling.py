"""How many replicas what is under way asks for."""

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.rpc.autoscaling import by_requests_in_progress, stats_of


def context(under_way_by_replica: dict[str, int], target: float = 192) -> Any:
    metrics: dict[str, dict[str, float]] = {}
    for replica, under_way in under_way_by_replica.items():
        for name, value in stats_of(under_way).items():
            metrics.setdefault(name, {})[replica] = value
    config = SimpleNamespace(get_target_ongoing_requests=lambda: target)
    return SimpleNamespace(aggregated_metrics=metrics, config=config, target_num_replicas=3)


@pytest.mark.parametrize(
    ("under_way", "replicas"), [({"a": 192}, 1), ({"a": 384, "b": 384}, 4), ({"a": 0, "b": 0}, 0), ({"a": 96}, 0.5)]
)
def test_replicas_are_as_many_as_carry_what_is_under_way(under_way: dict[str, int], replicas: float) -> None:
    assert by_requests_in_progress(context(under_way)) == (replicas, {})


def test_the_number_stays_while_no_replica_has_said_anything() -> None:
    assert by_requests_in_progress(context({})) == (3, {})
