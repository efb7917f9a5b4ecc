"""Steps and load of an engine process, from the records of vLLM's front end.

Needed with vLLM 0.32, whose `AsyncLLM` tells none of them for a single request; no upstream issue is known.
"""

import time
from typing import TYPE_CHECKING, Any

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
        """Tokens and waiting generations are counted at most every `_COUNT_LOAD_EVERY_S` seconds."""
        now = time.monotonic()
        if now >= self._count_load_at:
            self._count_load_at = now + _COUNT_LOAD_EVERY_S
            states = self._llm.output_processor.request_states.values()
            self._waiting = sum(state.is_prefilling for state in states)
            self._kv_tokens = sum(state.prompt_len + _output_tokens(state) for state in states)
        return ReplicaLoad(self._llm.get_num_unfinished_requests(), self._waiting, self._kv_tokens)


def _output_tokens(state: "RequestState") -> int:
    return 0 if state.detokenizer is None else state.detokenizer.num_output_tokens()
