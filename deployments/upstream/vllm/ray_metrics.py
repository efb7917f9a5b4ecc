"""vLLM's metrics for Ray's exporters, which get their values once a second and not with every step of the engine.

Needed with vLLM 0.32, whose own logger for Ray gives it each value at once: that costs 2 to 10 µs a value. No upstream
issue is known.
"""

from prometheus_client import REGISTRY
from prometheus_client.samples import Sample
from ray.util.metrics import Gauge

_PREFIX = "vllm:"
_CREATED = "_created"
"""How names of series end that have the time of another one's begin."""
_OF_NOW = "vllm:lora_requests_info"
"""Its labels say which adapters are used now; Prometheus keeps those of all times."""


class EngineMetrics:
    """An `Instrument` that gives Ray what vLLM counts for Prometheus, as gauges of the same names."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._gauges: dict[str, Gauge] = {}
        self._given: dict[tuple[str, ...], float] = {}

    def flush(self, repeats: bool = False) -> None:
        """As `Instrument.flush`."""
        for metric in REGISTRY.collect():
            if metric.name.startswith(_PREFIX) and metric.name != _OF_NOW:
                for sample in metric.samples:
                    series = sample.name, *sample.labels.values()
                    is_changed = repeats or self._given.get(series) != sample.value
                    if is_changed and not sample.name.endswith(_CREATED):
                        self._given[series] = sample.value
                        self._give(sample, metric.documentation)

    def _give(self, sample: Sample, description: str) -> None:
        name = sample.name.replace(":", "_")
        tags = {**sample.labels, "ReplicaId": self._replica_id}
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description, tuple(tags))
        self._gauges[name].set(sample.value, tags)
