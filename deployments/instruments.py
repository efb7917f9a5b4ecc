"""Counters, gauges and histograms that are kept here, and given to Ray again and again.

Ray takes 2 to 10 µs for each value: given the time of every token, it took 4% of the service's throughput. Here a
value takes a fraction of a microsecond. Each is made of the instruments of its `source`: those of Serve, which
tag each value with the replica, or those of `ray.util.metrics`.
"""

import asyncio
import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from time import monotonic
from types import ModuleType
from typing import Protocol

from ray.serve import metrics as serve_metrics

FLUSH_EVERY_S = 1.0
INFINITY = "+Inf"
logger = logging.getLogger("rollout_service.metrics")
Tags = tuple[str, ...]
"""Values of the tags of an instrument, in the order of their keys."""


class Instrument(Protocol):
    def flush(self, repeats: bool = False) -> None:
        """Gives Ray what has changed since the last time.

        Args: `repeats`: gives it what has not changed too. Ray's exporter forgets a gauge that was not set for two of
            its intervals.
        """


class SummedCounter:
    """A counter of Ray's that is given the sums of what was added since the last time."""

    def __init__(self, name: str, description: str, tag_keys: Tags, source: ModuleType = serve_metrics) -> None:
        self.counter = source.Counter(name, description=description, tag_keys=tag_keys)
        self._tag_keys = tag_keys
        self._sums: dict[Tags, float] = {}

    def add(self, value: float, *tags: str) -> None:
        self._sums[tags] = self._sums.get(tags, 0) + value

    def flush(self, repeats: bool = False) -> None:  # noqa: ARG002
        sums, self._sums = self._sums, {}
        for tags, value in sums.items():
            if value > 0:
                # Ray takes nothing else.
                self.counter.inc(value, dict(zip(self._tag_keys, tags, strict=True)))


class SummedHistogram:
    """A histogram, as gauges of the names that Prometheus gives to its parts. Its sum is exact; Ray's own is not."""

    def __init__(
        self,
        name: str,
        description: str,
        bounds: Sequence[float],
        tag_keys: Tags = (),
        source: ModuleType = serve_metrics,
    ) -> None:
        """`bounds` are the upper bounds of its buckets, in ascending order; the last one has no bound."""
        self._les = [*(str(float(bound)) for bound in bounds), INFINITY]
        self._tag_keys = tag_keys
        self.counts = source.Gauge(f"{name}_count", description=description, tag_keys=tag_keys)
        self._sums = source.Gauge(f"{name}_sum", description=description, tag_keys=tag_keys)
        self._buckets = source.Gauge(f"{name}_bucket", description=description, tag_keys=(*tag_keys, "le"))
        self._values: defaultdict[Tags, _BucketCounts] = defaultdict(partial(_BucketCounts, bounds))

    def observe(self, value: float, *tags: str) -> None:
        self._values[tags].observe(value)

    def flush(self, repeats: bool = False) -> None:
        for tags, values in self._values.items():
            if repeats or values.changed:
                self._flush(dict(zip(self._tag_keys, tags, strict=True)), values)

    def _flush(self, tags: dict[str, str], values: "_BucketCounts") -> None:
        values.changed = False
        count = 0
        for le, in_bucket in zip(self._les, values.in_buckets, strict=True):
            count += in_bucket
            self._buckets.set(count, {**tags, "le": le})
        self.counts.set(count, tags)
        self._sums.set(values.sum, tags)


class _BucketCounts:
    """The values of a histogram that have the same tags."""

    __slots__ = ("_bounds", "changed", "in_buckets", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.in_buckets = [0] * (len(bounds) + 1)
        """How many values each bucket has that are in none before it."""
        self.sum = 0.0
        self.changed = True
        """Since they were given to Ray."""

    def observe(self, value: float) -> None:
        # A value that is equal to the bound of a bucket is in it.
        self.in_buckets[bisect_left(self._bounds, value)] += 1
        self.sum += value
        self.changed = True


async def flush_periodically(instruments: Sequence[Instrument], report_interval_s: float) -> None:
    """Gives Ray the values once a second. An instrument whose values Ray refuses is logged once; the others go on.

    Args:
        instruments: may grow meanwhile.
        report_interval_s: interval of Ray's exporters, which forget a gauge that was not set for two of them.
    """
    refused: set[Instrument] = set()
    repeat_at = 0.0
    while True:
        await asyncio.sleep(FLUSH_EVERY_S)
        if repeats := monotonic() >= repeat_at:
            repeat_at = monotonic() + report_interval_s / 2
        for instrument in instruments:
            try:
                instrument.flush(repeats)
            except Exception:
                if instrument not in refused:
                    refused.add(instrument)
                    logger.exception("Ray refuses the values of a metric.")
            # Each may have many series: calls go on between two of them.
            await asyncio.sleep(0)
