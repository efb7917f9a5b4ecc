"""Steps, load and metrics of an engine process, from the records of vLLM's front end.

Needed with vLLM 0.32: its `AsyncLLM` tells neither steps nor load for a single request, and its own logger for Ray
gives Ray's exporters each value at once, which costs 2 to 10 µs a value. No upstream issue is known.
"""

import time
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from prometheus_client.samples import Sample
from ray.util.metrics import Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from deployments.protocols.replicas import ReplicaLoad

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState

_COUNT_LOAD_EVERY_S = 0.1
"""Counting takes a microsecond for each ongoing generation, and every answer carries the load."""


class StepCounter(StatLoggerBase):
    """Counts the steps of the engine; vLLM records each one, also those that compute a part of a prompt."""

    def __init__(self) -> None:
        self.taken = 0

    def record(self, *_stats: Any, **_more: Any) -> None:
        self.taken += 1

    def log_engine_initialized(self) -> None:
        pass


class EngineProgress:
    """Reads vLLM's own records of its requests."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm
        self._count_load_at = 0.0
        self._waiting = 0
        self._kv_tokens = 0

    def load(self) -> ReplicaLoad:
        """Tokens and waiting generations are counted at most every `_COUNT_LOAD_EVERY_S` seconds.

        Tokens that the engine's core holds (`held_outputs.py`) are not among them.
        """
        now = time.monotonic()
        if now >= self._count_load_at:
            self._count_load_at = now + _COUNT_LOAD_EVERY_S
            states = self._llm.output_processor.request_states.values()
            self._waiting = sum(state.is_prefilling for state in states)
            self._kv_tokens = sum(state.prompt_len + _output_tokens(state) for state in states)
        return ReplicaLoad(self._llm.get_num_unfinished_requests(), self._waiting, self._kv_tokens)


def _output_tokens(state: "RequestState") -> int:
    return 0 if state.detokenizer is None else state.detokenizer.num_output_tokens()


_PREFIX = "vllm:"
_CREATED = "_created"
"""How names of series end that have the time of another one's begin."""
_OF_NOW = "vllm:lora_requests_info"
"""Its labels say which adapters are used now; Prometheus keeps those of all times."""


class EngineMetrics:
    """An `Instrument` that gives Ray what vLLM counts for Prometheus, as gauges of the same names, once a second."""

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
