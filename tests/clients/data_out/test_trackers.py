"""`log_rollouts` against the packages themselves, which write to a folder: `make test-trackers`.

Elsewhere they are not there, and this file is not collected; `test_log_rollouts.py` has stand-ins.
"""

from pathlib import Path

import pytest

from rollout_client import log_rollouts
from tests.clients.data_out.test_log_rollouts import FIGURES, RESPONSE

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where trackers write that keep no other server."""
    for name, value in {"WANDB_SILENT": "true", "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return tmp_path


def test_wandb_gets_numbers_and_histograms_at_the_step(folder: Path) -> None:
    import wandb

    with wandb.init(project="test", dir=folder) as run:
        assert log_rollouts(RESPONSE, step=7) == ["wandb"]
        # wandb writes a step when the next one begins.
        run.log({}, step=8)
        summary = {name: run.summary[name] for name in run.summary.keys()}  # noqa: SIM118 - it is no dict
    assert {name: summary[f"rollouts/{name}"] for name in FIGURES} == FIGURES
    assert summary["_step"] == 7
    assert summary["rollouts/histogram/gen_tokens_length"]["_type"] == "histogram"
    assert sum(summary["rollouts/histogram/total_reward"]["values"]) == 3


def test_trackio_gets_numbers_and_histograms_at_the_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    for module in ("trackio", "trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", folder)
    trackio.init(project="test", name="run", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    assert log_rollouts(RESPONSE, step=7) == ["trackio"]
    trackio.finish()
    [logged] = SQLiteStorage.get_logs("test", "run")
    assert {name: logged[f"rollouts/{name}"] for name in FIGURES} == FIGURES
    assert logged["step"] == 7
    assert logged["rollouts/histogram/total_reward"]["_type"] == "trackio.histogram"


def test_mlflow_gets_the_numbers_at_the_step_under_names_that_it_takes(folder: Path) -> None:
    import mlflow

    mlflow.set_tracking_uri((folder / "runs").as_uri())
    mlflow.set_experiment("test")
    with mlflow.start_run() as run:
        assert log_rollouts(RESPONSE, step=7, prefix="") == ["mlflow"]
    metrics = mlflow.MlflowClient().get_metric_history(run.info.run_id, "rewards/for_mat_/mean")
    assert [(metric.step, metric.value) for metric in metrics] == [(7, 0.25)]
    logged = mlflow.get_run(run.info.run_id).data.metrics
    assert logged == {name.replace("[", "_").replace("]", "_"): value for name, value in FIGURES.items()}
