"""An engine whose steps take as long as those of a large model on a GPU, and leave the processor free meanwhile.

The embedded models compute on the processors that the servers need too. A GPU leaves them to the servers.
"""

from typing import Any

import typer
from ray.serve.schema import ServeDeploySchema

WORKER = "benchmarks.agents.waiting_worker.WaitingWorker"
STEP_MS = "ROLLOUT_BENCHMARK_STEP_MS"
"""The variable of the worker's environment with the least milliseconds of a step."""
DEFAULT_MS = 50.0


def step_ms_of(config: ServeDeploySchema, asked: float | None) -> float:
    """The least milliseconds of a step; 0: the engine does not wait.

    Args: `asked` of the command line.

    Raises:
        BadParameter: the engine runs on a GPU.
    """
    if config.applications[0].args["engine"].get("device", "gpu") == "cpu":
        return DEFAULT_MS if asked is None else asked
    if asked:
        raise typer.BadParameter("an engine on a GPU takes its own time for a step; leave --step-ms out")
    return 0.0


def with_waiting_steps(config: ServeDeploySchema, step_ms: float) -> ServeDeploySchema:
    """The config with an engine whose steps take at least `step_ms` milliseconds."""
    waiting = config.model_copy(deep=True)
    engine: dict[str, Any] = waiting.applications[0].args["engine"]
    engine["worker_cls"] = WORKER
    engine["environment_variables"] = {**engine.get("environment_variables", {}), STEP_MS: str(step_ms)}
    return waiting
