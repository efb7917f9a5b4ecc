"""vLLM's metrics as Ray's exporters get them."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Given = list[tuple[str, dict[str, str], float]]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """Names, tags without the replica's, and values."""
    from deployments.upstream.vllm import ray_metrics

    values: Given = []

    class Instrument:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self._name, self._tag_keys = name, tag_keys

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(self._tag_keys)
            values.append((self._name, {key: text for key, text in tags.items() if key != "ReplicaId"}, value))

        inc = set

    monkeypatch.setattr(ray_metrics, "metrics", SimpleNamespace(Counter=Instrument, Gauge=Instrument))
    monkeypatch.setattr(ray_metrics, "INSTRUMENTS", [])
    return values


def flush() -> None:
    from deployments.upstream.vllm import ray_metrics

    for instrument in ray_metrics.INSTRUMENTS:
        instrument.flush(repeats=True)


def test_a_histogram_is_given_to_ray_by_label_under_a_name_that_it_takes(given: Given) -> None:
    from deployments.upstream.vllm.ray_metrics import EngineHistogram

    histogram = EngineHistogram("vllm:step_seconds", "Time.", ["engine"], [0.5, 1])
    first, _second = histogram.labels("0"), histogram.labels(engine="1")
    for value in (0.5, 3.0):
        first.observe(value)
    flush()
    zero, one = {"engine": "0"}, {"engine": "1"}
    assert given == [
        ("vllm_step_seconds_bucket", {**zero, "le": "0.5"}, 1),
        ("vllm_step_seconds_bucket", {**zero, "le": "1.0"}, 1),
        ("vllm_step_seconds_bucket", {**zero, "le": "+Inf"}, 2),
        ("vllm_step_seconds_count", zero, 2),
        ("vllm_step_seconds_sum", zero, 3.5),
        ("vllm_step_seconds_bucket", {**one, "le": "0.5"}, 0),
        ("vllm_step_seconds_bucket", {**one, "le": "1.0"}, 0),
        ("vllm_step_seconds_bucket", {**one, "le": "+Inf"}, 0),
        ("vllm_step_seconds_count", one, 0),
        ("vllm_step_seconds_sum", one, 0.0),
    ]


def test_a_counter_whose_labels_are_asked_for_with_every_step_is_one(given: Given) -> None:
    from deployments.upstream.vllm.ray_metrics import EngineCounter

    counter = EngineCounter("vllm:cached_tokens", "Tokens.", ["engine", "source"])
    for value in (1, 2):
        counter.labels("0", "device").inc(value)
    counter.labels(source="host", engine="0").inc(4)
    assert counter.labels("0", "device") is counter.labels("0", "device")
    flush()
    assert given == [
        ("vllm_cached_tokens", {"engine": "0", "source": "device"}, 3),
        ("vllm_cached_tokens", {"engine": "0", "source": "host"}, 4),
    ]


def test_a_gauge_keeps_its_value_between_steps(given: Given) -> None:
    from deployments.upstream.vllm.ray_metrics import EngineGauge

    gauge = EngineGauge("vllm:running", "Requests.", ["engine"], "mostrecent").labels("0")
    gauge.set(1)
    gauge.set(0)
    flush()
    flush()
    assert given == [("vllm_running", {"engine": "0"}, 0)] * 2


def test_a_gauge_whose_labels_say_what_is_so_now_is_not_kept(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.upstream.vllm import ray_metrics

    monkeypatch.setattr(ray_metrics, "time", lambda: 12.0)
    ray_metrics.EngineGauge("vllm:adapters", "Now.", ["running"]).labels(running="a,b").set_to_current_time()
    assert given == [("vllm_adapters", {"running": "a,b"}, 12.0)]
    flush()
    assert len(given) == 1


def test_a_metric_without_labels_has_the_tag_of_its_replica_alone(given: Given) -> None:
    from deployments.upstream.vllm.ray_metrics import EngineCounter, EngineGauge, EngineHistogram

    EngineCounter("vllm:counted", "Calls.").inc()
    EngineGauge("vllm:running", "Requests.").set(2)
    EngineHistogram("vllm:seconds", "Time.").observe(3.0)
    flush()
    assert given == [
        ("vllm_counted", {}, 1.0),
        ("vllm_running", {}, 2),
        ("vllm_seconds_bucket", {"le": "+Inf"}, 1),
        ("vllm_seconds_count", {}, 1),
        ("vllm_seconds_sum", {}, 3.0),
    ]


def test_no_metric_of_vllms_goes_to_ray_with_every_step() -> None:
    from vllm.v1.metrics.ray_wrappers import RayCounterWrapper, RayGaugeWrapper, RayHistogramWrapper

    from deployments.upstream.vllm.ray_metrics import EngineMetrics

    raw: tuple[Any, ...] = (RayCounterWrapper, RayGaugeWrapper, RayHistogramWrapper)
    parts = ("_spec_decoding_cls", "_kv_connector_cls", "_perf_metrics_cls")
    for logger in (EngineMetrics, *(getattr(EngineMetrics, part) for part in parts)):
        for kind in ("_counter_cls", "_gauge_cls", "_histogram_cls"):
            assert getattr(logger, kind, None) not in raw, (logger, kind)
