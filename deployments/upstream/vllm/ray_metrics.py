"""vLLM's metrics for Ray's exporters, which get their values once a second and not with every step of the engine.

Needed with vLLM 0.32, which gives Ray each value at once: that costs 2 to 10 µs a value. No upstream issue is known.
"""

from collections.abc import Sequence
from time import time
from typing import Any, Self, cast

from ray.util import metrics
from vllm.v1.metrics.ray_wrappers import (
    RayKVConnectorProm,
    RayPerfMetricsProm,
    RayPrometheusMetric,
    RayPrometheusStatLogger,
    RaySpecDecodingProm,
)

from deployments.instruments import Instrument, LastingGauge, SummedCounter, SummedHistogram

INSTRUMENTS: list[Instrument] = []
"""Instruments of this process, for `flush_periodically`."""


class _EngineMetric(RayPrometheusMetric):
    """A metric that has `labels`, as those of `prometheus_client` have."""

    def __init__(self, name: str, label_names: Sequence[str] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = self._get_sanitized_opentelemetry_name(name)
        self._tag_keys = self._get_tag_keys(list(label_names or ()))
        self._tag_values = tuple(self._tags.values())

    def _keep(self, instrument: Instrument, metric: metrics.Metric) -> None:
        INSTRUMENTS.append(instrument)
        self.metric: Any = metric

    def labels(self, *labels: Any, **named: Any) -> Self:
        clone = cast(Self, super().labels(*labels, **named))
        clone._tag_values = tuple(clone._tags[key] for key in self._tag_keys)
        return clone


class EngineCounter(_EngineMetric):
    def __init__(self, name: str, documentation: str = "", labelnames: Sequence[str] | None = None) -> None:
        super().__init__(name, labelnames)
        self._summed = SummedCounter(self._name, documentation, self._tag_keys, metrics)
        self._labelled: dict[Any, Self] = {}
        self._keep(self._summed, self._summed.counter)

    def labels(self, *labels: Any, **named: Any) -> Self:
        # vLLM asks for the same ones with every step.
        key = labels, tuple(named.items())
        if self._is_labeled or (clone := self._labelled.get(key)) is None:
            clone = self._labelled[key] = super().labels(*labels, **named)
        return clone

    def inc(self, value: float = 1.0) -> None:
        self._summed.add(value, *self._tag_values)


class EngineGauge(_EngineMetric):
    def __init__(
        self,
        name: str,
        documentation: str = "",
        labelnames: Sequence[str] | None = None,
        multiprocess_mode: str = "",  # noqa: ARG002
    ) -> None:
        """`multiprocess_mode` is for `prometheus_client` alone."""
        super().__init__(name, labelnames)
        self._lasting = LastingGauge(self._name, documentation, self._tag_keys, metrics)
        self._keep(self._lasting, self._lasting.gauge)

    def set(self, value: float) -> None:
        self._lasting.set(value, *self._tag_values)

    def set_to_current_time(self) -> None:
        # The labels of such a gauge say what is so now: Ray's exporter forgets those that are no longer set.
        self.metric.set(time(), self._tags)


class EngineHistogram(_EngineMetric):
    def __init__(
        self,
        name: str,
        documentation: str = "",
        labelnames: Sequence[str] | None = None,
        buckets: Sequence[float] = (),
    ) -> None:
        super().__init__(name, labelnames)
        self._summed = SummedHistogram(self._name, documentation, buckets, self._tag_keys, metrics)
        self._keep(self._summed, self._summed.counts)

    def labels(self, *labels: Any, **named: Any) -> Self:
        clone = super().labels(*labels, **named)
        clone.observe = self._summed.values_of(clone._tag_values).observe  # type: ignore[method-assign]
        return clone

    def observe(self, value: float) -> None:
        self._summed.observe(value, *self._tag_values)


class _SpecDecodingMetrics(RaySpecDecodingProm):
    _counter_cls: Any = EngineCounter


class _KVConnectorMetrics(RayKVConnectorProm):
    _gauge_cls: Any = EngineGauge
    _counter_cls: Any = EngineCounter
    _histogram_cls: Any = EngineHistogram


class _PerfMetrics(RayPerfMetricsProm):
    _counter_cls: Any = EngineCounter


class EngineMetrics(RayPrometheusStatLogger):
    """A stat logger of vLLM's."""

    _gauge_cls: Any = EngineGauge
    _counter_cls: Any = EngineCounter
    _histogram_cls: Any = EngineHistogram
    _spec_decoding_cls: Any = _SpecDecodingMetrics
    _kv_connector_cls: Any = _KVConnectorMetrics
    _perf_metrics_cls: Any = _PerfMetrics
