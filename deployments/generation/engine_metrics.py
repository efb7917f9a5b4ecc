"""vLLM's metrics for Ray's exporters, with histograms that are summed here.

vLLM's logger gives Ray the time of every token: with its checks Ray takes about 10 µs for each value, which took 4% of
the service's throughput. Here a value is counted in a fraction of a microsecond, and Ray gets the counts of the buckets
once a second, as gauges of the names that Prometheus gives to the parts of a histogram. Queries are the same as before.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, ClassVar

from ray.util.metrics import Gauge
from vllm.v1.metrics.ray_wrappers import RayKVConnectorProm, RayPrometheusMetric, RayPrometheusStatLogger

FLUSH_EVERY_S = 1.0
INFINITY = "+Inf"


class SummedHistogram(RayPrometheusMetric):
    """Has what vLLM uses of `prometheus_client.Histogram`."""

    labelled: ClassVar[list["SummedHistogram"]] = []
    """All of this process that take values."""

    def __init__(
        self,
        name: str,
        documentation: str | None = "",
        labelnames: list[str] | None = None,
        buckets: Sequence[float] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tag_keys, name = self._get_tag_keys(labelnames), self._get_sanitized_opentelemetry_name(name)
        self._bounds = list(buckets or ())
        self._les = [*(f"{float(bound):g}" for bound in self._bounds), INFINITY]
        self.metric = self._counts = Gauge(f"{name}_count", documentation or "", tag_keys)
        self._sums = Gauge(f"{name}_sum", documentation or "", tag_keys)
        self._buckets = Gauge(f"{name}_bucket", documentation or "", (*tag_keys, "le"))
        self._begin()

    def _begin(self) -> None:
        self._values = [0] * len(self._les)
        """How many values each bucket has that are in none before it."""
        self._sum = 0.0

    def labels(self, *labels: Any, **named: Any) -> "SummedHistogram":
        clone = super().labels(*labels, **named)
        assert isinstance(clone, SummedHistogram)
        clone._begin()
        SummedHistogram.labelled.append(clone)
        return clone

    def observe(self, value: float) -> None:
        # A value that is equal to the bound of a bucket is in it.
        self._values[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def flush(self) -> None:
        """Gives Ray the counts of all buckets. Ray forgets a gauge that is not set for two of its intervals."""
        count = 0
        for le, values in zip(self._les, self._values, strict=True):
            count += values
            self._buckets.set(count, {**self._tags, "le": le})
        self._counts.set(count, self._tags)
        self._sums.set(self._sum, self._tags)


class KVConnectorMetrics(RayKVConnectorProm):
    _histogram_cls: Any = SummedHistogram


class EngineMetrics(RayPrometheusStatLogger):
    """A stat logger of vLLM's. `flush_again_and_again` must run beside it."""

    _histogram_cls: Any = SummedHistogram
    _kv_connector_cls: Any = KVConnectorMetrics


async def flush_again_and_again() -> None:
    while True:
        await asyncio.sleep(FLUSH_EVERY_S)
        for histogram in SummedHistogram.labelled:
            histogram.flush()
