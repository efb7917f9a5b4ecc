"""What Harbor and inspect-ai read of evaluations of ours: `python evaluators_program.py FOLDER RESULTS`.

It runs where both are installed, unmodified. `FOLDER` has `jobs` with jobs of Harbor, and `logs` with logs of inspect;
`RESULTS` becomes JSON with what the packages' own models and viewers say.
"""

import json
import sys
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from harbor.models.job.config import JobConfig
from harbor.models.job.result import JobResult, JobStats
from harbor.models.trajectories import Trajectory
from harbor.models.trial.config import TrialConfig
from harbor.models.trial.result import TrialResult
from harbor.utils.pass_at_k import compute_pass_at_k_by_evals
from harbor.utils.trajectory_validator import TrajectoryValidator
from harbor.viewer.server import create_app
from inspect_ai.log import (
    list_eval_logs,
    read_eval_log,
    read_eval_log_sample,
    read_eval_log_sample_summaries,
    retryable_eval_logs,
)


def job_of(folder: Path) -> dict[str, Any]:
    """A job by Harbor's models, beside what Harbor itself would count of the same trials."""
    JobConfig.model_validate_json((folder / "config.json").read_text())
    job = JobResult.model_validate_json((folder / "result.json").read_text())
    trials, trajectories = [], []
    for path in sorted(folder.glob("*/result.json")):
        TrialConfig.model_validate_json((path.parent / "config.json").read_text())
        trials.append(TrialResult.model_validate_json(path.read_text()))
        if (told := path.parent / "agent" / "trajectory.json").exists():
            validator = TrajectoryValidator()
            trajectory = Trajectory.model_validate_json(told.read_text())
            trajectories.append([validator.validate(told), validator.get_errors(), len(trajectory.steps)])
    counted = JobStats.from_trial_results(trials, n_total_trials=job.n_total_trials)
    return {
        "job": job.model_dump(mode="json"),
        "trials": [trial.model_dump(mode="json") for trial in trials],
        "trajectories": trajectories,
        "counted": counted.model_dump(mode="json"),
        "pass_at_k": compute_pass_at_k_by_evals(trials),
    }


def viewed(folder: Path) -> dict[str, Any]:
    """What the pages of `harbor view` ask for."""
    with TestClient(create_app(folder)) as client:

        def page(path: str) -> Any:
            answer = client.get(f"/api/jobs{path}")
            return answer.raise_for_status().json()

        jobs = {each["name"]: each for each in page("")["items"]}
        found = {}
        for name in jobs:
            trials = page(f"/{name}/trials")["items"]
            first = trials[0]["name"]
            found[name] = {
                "job": page(f"/{name}"),
                "tasks": page(f"/{name}/tasks")["items"],
                "trials": trials,
                "trial": page(f"/{name}/trials/{first}"),
                "trajectory": page(f"/{name}/trials/{first}/trajectory"),
                "verifier": page(f"/{name}/trials/{first}/verifier-output"),
            }
        return {"jobs": jobs, "pages": found}


def log_of(path: Path) -> dict[str, Any]:
    log = read_eval_log(str(path))
    assert log.samples
    first = log.samples[0]
    again = read_eval_log_sample(str(path), first.id, first.epoch)
    summaries = read_eval_log_sample_summaries(str(path))
    return {
        "log": json.loads(log.model_dump_json(exclude_none=True)),
        "again": again.output.completion,
        "summaries": [json.loads(each.model_dump_json(exclude_none=True)) for each in summaries],
    }


def main(folder: Path, results: Path) -> None:
    jobs, logs = folder / "jobs", folder / "logs"
    listed = list_eval_logs(str(logs))
    found = {
        "jobs": {each.name: job_of(each) for each in sorted(jobs.iterdir())},
        "viewed": viewed(jobs),
        "logs": {each.name: log_of(each) for each in sorted(logs.iterdir())},
        "listed": sorted(Path(each.name).name for each in listed),
        "retryable": sorted(Path(each.name).name for each in retryable_eval_logs(listed)),
    }
    results.write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
