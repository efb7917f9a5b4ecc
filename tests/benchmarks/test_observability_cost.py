"""What `make bench-observability` says of its rounds."""

from typing import Any

import httpx
import pytest

from benchmarks.engine_comparison import Round, Rounds
from benchmarks.observability_cost import Collector, collector, configs, figures_of, missed, standard_error
from benchmarks.workload import Workload

pytestmark = pytest.mark.slow

WORKLOAD = Workload(2, 1, 4)


def measured(off: list[float], on: list[float]) -> Rounds:
    return {WORKLOAD: {way: [Round(seconds, seconds) for seconds in of] for way, of in (("off", off), ("on", on))}}


def test_the_ratio_is_the_median_of_neighbouring_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collector, "received_bytes", 5000)
    figures = figures_of(measured([1.0, 2.0, 4.0], [1.0, 2.5, 4.0]))
    assert figures == {
        "throughput_ratios": {"2x1x4": 1.0},
        "geometric_mean": 1.0,
        "standard_error": 0.067,
        "processor_ms_per_turn": {"2x1x4": {"off": 1000.0, "on": 1250.0}},
        "kilobytes_of_traces": 5,
    }
    assert missed(figures, 1.0) == []


def test_more_than_two_percent_and_traces_that_do_not_come_miss_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collector, "received_bytes", 0)
    figures = figures_of(measured([1.0], [1.03]))
    assert missed(figures, 0.0) == ["with metrics and records the service has 0.971 of its throughput, less than 0.98"]
    assert missed(figures, 1.0) == [
        "with metrics, tracing and records the service has 0.971 of its throughput, less than 0.98",
        "no trace has come in",
    ]


def test_one_service_has_both_and_the_other_has_none() -> None:
    served: dict[str, Any] = {"applications": [{"args": {"limits": {}}}]}
    args = {
        way: config["applications"][0]["args"] for way, config in configs(served, "http://c/v1/traces", 0.5).items()
    }
    assert args == {
        "off": {"limits": {}, "metrics": False, "tracing": None, "rollout_records": None},
        "on": {
            "limits": {},
            "metrics": True,
            "tracing": {"endpoint": "http://c/v1/traces", "sample_rate": 0.5},
            "rollout_records": {},
        },
    }


def test_the_collector_counts_what_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collector, "received_bytes", 0)
    with collector() as url:
        assert httpx.post(url, content=b"spans", trust_env=False).status_code == 200
    assert Collector.received_bytes == 5


def test_what_workloads_differ_by_is_no_chance() -> None:
    assert standard_error([[0.9, 0.9], [1.1, 1.1]]) == 0.0
    assert standard_error([[0.9, 1.1], [1.0, 1.2]]) == 0.071
    assert standard_error([[0.9], [1.1]]) is None
