"""`log_rollouts`: logs the figures of a response to the active run of wandb, trackio or MLflow.

None of them is imported: where a run is active, its package is imported already.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rollout_client.data_out.response_parts import AnyResponse, parts_of
from rollout_client.errors import RolloutError
from rollout_client.results import final_reward

Figures = Mapping[str, float]
Histograms = Mapping[str, list[float]]
Log = Callable[[Figures, Histograms, int], None]
NOT_OF_MLFLOW = re.compile(r"[^\w\-. :/]")


class NoActiveRun(RolloutError):
    """No experiment tracker has an active run."""


def log_rollouts(response: AnyResponse, step: int, prefix: str = "rollouts/") -> list[str]:
    """Logs the metrics of `response`, and how its rollouts ended, to every active run.

    All trackers get the numbers; wandb and trackio also get histograms of the final rewards and of the metrics.

    Args:
        step: the step of the training.
        prefix: the prefix of each name.

    Returns:
        The trackers that have a run, of `wandb`, `trackio` and `mlflow`.

    Raises:
        NoActiveRun: none has one.
    """
    logs = dict(active_runs())
    if not logs:
        raise NoActiveRun("No run is active: call wandb.init(), trackio.init() or mlflow.start_run() first.")
    figures = {f"{prefix}{name}": value for name, value in figures_of(response).items()}
    histograms = {f"{prefix}{name}": values for name, values in histograms_of(response).items()}
    for log in logs.values():
        log(figures, histograms, step)
    return list(logs)


def figures_of(response: AnyResponse) -> dict[str, float]:
    """Metrics that are one number, the number of rollouts, and the share of each status.

    `per_worker_token_counts` is left out: its names change with each replica that starts.
    """
    summary, samples = parts_of(response)
    statuses = [sample.status for sample in samples]
    shares = {f"status/{status}": statuses.count(status) / len(statuses) for status in set(statuses)}
    numbers = {name: float(value) for name, value in summary.metrics.items() if isinstance(value, int | float)}
    return {"count": float(len(samples)), **shares, **numbers}


def histograms_of(response: AnyResponse) -> dict[str, list[float]]:
    summary, samples = parts_of(response)
    rewards = [reward for sample in samples if (reward := final_reward(sample)) is not None]
    lists = {
        name: [float(item) for item in value] for name, value in summary.metrics.items() if isinstance(value, list)
    }
    return {name: values for name, values in {"histogram/total_reward": rewards, **lists}.items() if values}


def active_runs() -> Iterator[tuple[str, Log]]:
    wandb, trackio, mlflow = (sys.modules.get(name) for name in ("wandb", "trackio", "mlflow"))
    if wandb is not None and wandb.run is not None:
        yield "wandb", log_with_histograms(wandb.run.log, wandb.Histogram)
    if trackio is not None and trackio.context_vars.current_run.get() is not None:
        yield "trackio", log_with_histograms(trackio.log, trackio.Histogram)
    if mlflow is not None and mlflow.active_run() is not None:
        yield "mlflow", log_to_mlflow(mlflow)


def log_with_histograms(log: Callable[..., None], histogram: Callable[[list[float]], Any]) -> Log:
    def both(figures: Figures, histograms: Histograms, step: int) -> None:
        log({**figures, **{name: histogram(values) for name, values in histograms.items()}}, step=step)

    return both


def log_to_mlflow(mlflow: Any) -> Log:
    def numbers(figures: Figures, _histograms: Histograms, step: int) -> None:
        mlflow.log_metrics({NOT_OF_MLFLOW.sub("_", name): value for name, value in figures.items()}, step=step)

    return numbers
