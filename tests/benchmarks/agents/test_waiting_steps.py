"""The engine of `make bench-agents` whose steps wait."""

from typing import Any

import pytest
import typer
from ray.serve.schema import ServeDeploySchema

from benchmarks.agents.waiting_steps import step_ms_of, with_waiting_steps


def config(**engine: Any) -> ServeDeploySchema:
    application = {"name": "rollout", "import_path": "service.app:build", "args": {"engine": engine}}
    return ServeDeploySchema.model_validate({"applications": [application]})


def test_the_engine_has_a_worker_that_waits_and_its_own_variables() -> None:
    given = config(device="cpu", model="m", environment_variables={"VLLM_LOGGING_LEVEL": "ERROR"})
    assert with_waiting_steps(given, 20.0).applications[0].args["engine"] == {
        "device": "cpu",
        "model": "m",
        "worker_cls": "benchmarks.agents.waiting_worker.WaitingWorker",
        "environment_variables": {"VLLM_LOGGING_LEVEL": "ERROR", "ROLLOUT_BENCHMARK_STEP_MS": "20.0"},
    }
    assert "worker_cls" not in given.applications[0].args["engine"]


@pytest.mark.parametrize(("device", "asked", "ms"), [("cpu", None, 50.0), ("cpu", 0.0, 0.0), ("gpu", None, 0.0)])
def test_steps_wait_by_default_where_the_engine_computes_on_the_processor(
    device: str, asked: float | None, ms: float
) -> None:
    assert step_ms_of(config(device=device, model="m"), asked) == ms


def test_steps_of_an_engine_on_a_gpu_cannot_wait() -> None:
    with pytest.raises(typer.BadParameter, match="on a GPU"):
        step_ms_of(config(model="m"), 20.0)
