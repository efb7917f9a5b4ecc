"""The worker of an engine `with_waiting_steps`: it computes as vLLM's does, and then waits."""

import os
import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from benchmarks.agents.waiting_steps import STEP_MS


class WaitingWorker(CPUWorker):
    """A step is a forward pass and the sampling of its tokens, which vLLM calls one after the other."""

    _ends_at = 0.0

    def execute_model(self, scheduler_output: Any) -> Any:
        self._ends_at = time.monotonic() + float(os.environ[STEP_MS]) / 1000
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        time.sleep(max(0.0, self._ends_at - time.monotonic()))
        return output
