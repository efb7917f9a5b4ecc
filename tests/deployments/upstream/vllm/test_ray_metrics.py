"""vLLM's metrics as Ray's exporters get them."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from deployments.upstream.vllm import engine_progress
from deployments.upstream.vllm.engine_progress import EngineMetrics
from tests.fakes.instruments import Given, remembering

pytestmark = pytest.mark.slow

REPLICA = {"ReplicaId": "b3x9k2"}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    registry = CollectorRegistry()
    monkeypatch.setattr(engine_progress, "REGISTRY", registry)
    return registry


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    values: Given = []
    monkeypatch.setattr(engine_progress, "Gauge", remembering(values))
    return values


def test_each_kind_of_metric_has_a_name_that_ray_takes(registry: CollectorRegistry, given: Given) -> None:
    Counter("vllm:tokens", "Tokens.", ["engine"], registry=registry).labels("0").inc(3)
    Gauge("vllm:running", "Requests.", registry=registry).set(2)
    histogram = Histogram("vllm:step_seconds", "Time.", ["engine"], buckets=[0.5, 1], registry=registry).labels("0")
    for value in (0.5, 3.0):
        histogram.observe(value)
    Counter("other", "Of another package.", registry=registry).inc()
    EngineMetrics("b3x9k2").flush()
    tags = {"engine": "0", **REPLICA}
    assert given == [
        ("vllm_tokens_total", tags, 3),
        ("vllm_running", REPLICA, 2),
        *(("vllm_step_seconds_bucket", {**tags, "le": le}, n) for le, n in (("0.5", 1), ("1.0", 1), ("+Inf", 2))),
        ("vllm_step_seconds_count", tags, 2),
        ("vllm_step_seconds_sum", tags, 3.5),
    ]


def test_a_value_is_given_when_it_changes_or_ray_would_forget_it(registry: CollectorRegistry, given: Given) -> None:
    gauge = Gauge("vllm:running", "Requests.", registry=registry)
    engine = EngineMetrics("b3x9k2")
    gauge.set(1)
    engine.flush()
    engine.flush()
    assert given == [("vllm_running", REPLICA, 1)]
    engine.flush(repeats=True)
    gauge.set(0)
    engine.flush()
    assert [value for _, _, value in given] == [1, 1, 0]


def test_the_adapters_of_all_times_are_not_given(registry: CollectorRegistry, given: Given) -> None:
    Gauge("vllm:lora_requests_info", "Now.", ["running"], registry=registry).labels("a,b").set(12.0)
    EngineMetrics("b3x9k2").flush()
    assert given == []
