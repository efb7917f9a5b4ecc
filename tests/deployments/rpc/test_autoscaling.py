"""How many replicas the requests in progress need."""

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.rpc.autoscaling import by_engine_size, by_requests_in_progress, stats_of

REPLICAS_NOW = 3


def context(in_progress_by_replica: dict[str, int]) -> Any:
    """What Serve passes when its config asks for 192 requests in progress per replica."""
    metrics: dict[str, dict[str, float]] = {}
    for replica, in_progress in in_progress_by_replica.items():
        for name, value in stats_of(in_progress).items():
            metrics.setdefault(name, {})[replica] = value
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 192)
    return SimpleNamespace(aggregated_metrics=metrics, config=config, target_num_replicas=REPLICAS_NOW)


@pytest.mark.parametrize(
    ("in_progress", "replicas"), [({"a": 192}, 1), ({"a": 384, "b": 384}, 4), ({"a": 0, "b": 0}, 0), ({"a": 96}, 0.5)]
)
def test_replicas_are_as_many_as_have_the_target_in_progress(in_progress: dict[str, int], replicas: float) -> None:
    assert by_requests_in_progress(context(in_progress)) == (replicas, {})


def test_the_number_stays_while_nothing_is_reported_or_configured() -> None:
    unreported, unconfigured = context({}), context({"a": 192})
    unreported.aggregated_metrics = unconfigured.config = None
    for given in (context({}), unreported, unconfigured):
        assert by_requests_in_progress(given) == (REPLICAS_NOW, {})


def test_generators_are_added_when_their_engines_are_three_quarters_full() -> None:
    reported = context({"a": 768, "b": 768})
    reported.aggregated_metrics["at_once"] = {"a": 1024.0, "b": 1024.0}
    assert by_engine_size(reported) == (2.0, {})
    assert by_engine_size(context({"a": 384})) == (2.0, {}), "where none says what it runs at once, by the config"


def test_a_replica_reports_what_it_runs_at_once_where_it_knows() -> None:
    assert stats_of(3) == {"in_progress": 3.0}
    assert stats_of(3, 1024) == {"in_progress": 3.0, "at_once": 1024.0}
