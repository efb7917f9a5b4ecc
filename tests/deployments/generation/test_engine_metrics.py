"""vLLM's histograms as Ray's exporters get them."""

from typing import Any

import pytest

pytestmark = pytest.mark.slow


class Told:
    """In the place of a gauge of Ray's."""

    def __init__(self, name: str, _description: str, tag_keys: tuple[str, ...]) -> None:
        self.name, self._tag_keys = name, tag_keys
        self.values: dict[tuple[tuple[str, str], ...], float] = {}

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self._tag_keys)
        self.values[tuple(sorted(tags.items()))] = value


def test_a_histogram_has_cumulative_buckets_by_label_a_sum_and_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.generation import engine_metrics

    made: list[Told] = []

    def gauge(*given: Any) -> Told:
        made.append(Told(*given))
        return made[-1]

    monkeypatch.setattr(engine_metrics, "Gauge", gauge)
    monkeypatch.setattr(engine_metrics.SummedHistogram, "labelled", [])
    histogram = engine_metrics.SummedHistogram("vllm:step_seconds", "Time.", ["engine"], [0.5, 1, 2.5])
    for engine, values in (("0", [0.5, 0.75, 3.0]), ("1", [1.0])):
        labelled = histogram.labels(engine)
        for value in values:
            labelled.observe(value)
    for labelled in engine_metrics.SummedHistogram.labelled:
        labelled.flush()
    counts, sums, buckets = made
    assert [counts.name, sums.name, buckets.name] == [
        "vllm_step_seconds_count",
        "vllm_step_seconds_sum",
        "vllm_step_seconds_bucket",
    ]
    assert [list(one.values.values()) for one in (counts, sums)] == [[3, 1], [4.25, 1.0]]
    first, second = list(buckets.values.items())[:4], list(buckets.values.items())[4:]
    assert [(dict(tags)["le"], count) for tags, count in first] == [("0.5", 1), ("1", 2), ("2.5", 2), ("+Inf", 3)]
    assert [(dict(tags)["le"], count) for tags, count in second] == [("0.5", 0), ("1", 1), ("2.5", 1), ("+Inf", 1)]
    assert {dict(tags)["engine"] for tags, _ in second} == {"1"}


def test_all_histograms_of_vllm_are_summed() -> None:
    from vllm.v1.metrics.ray_wrappers import RayHistogramWrapper

    from deployments.generation.engine_metrics import EngineMetrics, SummedHistogram

    assert EngineMetrics._histogram_cls is SummedHistogram
    assert EngineMetrics._kv_connector_cls._histogram_cls is SummedHistogram
    others = (EngineMetrics._spec_decoding_cls, EngineMetrics._perf_metrics_cls)
    assert all(getattr(one, "_histogram_cls", None) is not RayHistogramWrapper for one in others)
