"""The worker of an engine `with_waiting_steps`: it computes as vLLM's does, and then waits."""

import os
import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from benchmarks.agents.waiting_steps import STEP_MS


class WaitingWorker(CPUWorker):
    def execute_model(self, scheduler_output: Any) -> Any:
        ends_at = time.monotonic() + float(os.environ[STEP_MS]) / 1000
        output = super().execute_model(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            time.sleep(max(0.0, ends_at - time.monotonic()))
        return output
