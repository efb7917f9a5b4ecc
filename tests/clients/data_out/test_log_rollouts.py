"""`log_rollouts` with stand-ins for the trackers: which run gets what. `test_trackers.py` has the packages."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_client import NoActiveRun, log_rollouts
from tests.clients.data_out.responses import response_of
from tests.clients.scripted_service import result

METRICS = {
    "mean_total_reward": 0.5,
    "rewards/for[mat]/mean": 0.25,
    "histogram/gen_tokens_length": [2, 3],
    "per_worker_token_counts": {"x7": 5},
}
RESPONSE = response_of(
    result(), result(status="truncated", total_reward=0.0), result(status="cancelled"), result(), metrics=METRICS
)
FIGURES = {
    "count": 4.0,
    "status/completed": 0.5,
    "status/truncated": 0.25,
    "status/cancelled": 0.25,
    "mean_total_reward": 0.5,
    "rewards/for[mat]/mean": 0.25,
}
HISTOGRAMS = {"histogram/total_reward": (1.0, 0.0, 1.0), "histogram/gen_tokens_length": (2.0, 3.0)}

Logged = list[tuple[dict[str, Any], int]]


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins without a run, each with what was logged to it."""
    stand_ins: dict[str, Any] = {}
    for name in ("wandb", "trackio", "mlflow"):
        logged: Logged = []

        def log(values: dict[str, Any], step: int, logged: Logged = logged) -> None:
            logged.append((values, step))

        current = SimpleNamespace(get=lambda: None)
        stand_ins[name] = SimpleNamespace(
            run=None,
            active_run=lambda: None,
            context_vars=SimpleNamespace(current_run=current),
            log=log,
            log_metrics=log,
            Histogram=tuple,
            logged=logged,
        )
        monkeypatch.setitem(sys.modules, name, stand_ins[name])
    return stand_ins


def test_without_a_run_the_error_says_what_to_call(trackers: dict[str, Any]) -> None:
    with pytest.raises(NoActiveRun, match=r"call wandb.init\(\), trackio.init\(\) or mlflow.start_run\(\) first"):
        log_rollouts(RESPONSE, step=1)
    for name in trackers:
        del sys.modules[name]
    with pytest.raises(NoActiveRun):
        log_rollouts(RESPONSE, step=1)


def test_every_active_run_gets_the_numbers_and_those_with_histograms_get_them(trackers: dict[str, Any]) -> None:
    trackers["wandb"].run = SimpleNamespace(log=trackers["wandb"].log)
    trackers["trackio"].context_vars.current_run.get = lambda: "run"
    trackers["mlflow"].active_run = lambda: "run"
    assert log_rollouts(RESPONSE, step=7, prefix="r/") == ["wandb", "trackio", "mlflow"]
    both = {f"r/{name}": value for name, value in (FIGURES | HISTOGRAMS).items()}
    assert trackers["wandb"].logged == trackers["trackio"].logged == [(both, 7)]
    renamed = {f"r/{name}".replace("[", "_").replace("]", "_"): value for name, value in FIGURES.items()}
    assert trackers["mlflow"].logged == [(renamed, 7)]


def test_only_active_runs_get_something(trackers: dict[str, Any]) -> None:
    trackers["trackio"].context_vars.current_run.get = lambda: "run"
    assert log_rollouts(response_of(metrics={}), step=0) == ["trackio"]
    assert (trackers["wandb"].logged, trackers["trackio"].logged) == ([], [({"rollouts/count": 0.0}, 0)])
