"""Evaluations that `rollout eval` has written, as Harbor and inspect-ai read them with their own models and viewers.

`python -m requirements.beside harbor` installs both. `evaluators_program.py` calls them.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_client.data_out.evaluation import Evaluation
from rollout_client.data_out.evaluation_file import EvaluationFile, EvaluationFormat
from tests.clients.data_out.evaluations import evaluation, interrupted

PROGRAM = Path(__file__).with_name("evaluators_program.py")
PYTHON = Path(os.environ["ROLLOUT_EVALUATORS"], "bin", "python")
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="there is no Python 3.13, which Harbor needs")
MADE: dict[str, Callable[[], Evaluation]] = {
    "whole": evaluation,
    "stopped": interrupted,
    "failed": lambda: interrupted(status="error", reason="The stream broke."),
}
PREFIX = "2026-11-27T09-00-00_"
"""So inspect finds logs in JSON in a folder; those in a zip have any name."""
COUNTED_ALIKE = (
    *("n_completed_trials", "n_errored_trials", "n_pending_trials", "n_cancelled_trials", "n_retries"),
    *("n_input_tokens", "n_output_tokens"),
)
EVAL = "rollout__org/tiny__terminal"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("evaluations")
    (folder / "jobs").mkdir()
    (folder / "logs").mkdir()
    for name, make in MADE.items():
        targets: list[tuple[str, EvaluationFormat]] = [(f"jobs/{name}", "harbor")]
        targets += [(f"logs/{PREFIX}{name}.json", "inspect"), (f"logs/{name}.eval", "inspect")]
        for path, format in targets:
            EvaluationFile(folder / path, format).write(make())
    results = folder / "results.json"
    done = subprocess.run([PYTHON, PROGRAM, folder, results], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(results.read_text())


@pytest.mark.parametrize("name", MADE)
def test_harbor_counts_the_trials_of_a_job_as_the_job_says(found: Any, name: str) -> None:
    said, counted = (found["jobs"][name][key] for key in ("job", "counted"))
    assert {key: said["stats"][key] for key in COUNTED_ALIKE} == {key: counted[key] for key in COUNTED_ALIKE}
    for key in ("n_trials", "n_errors", "reward_stats", "exception_stats"):
        assert said["stats"]["evals"][EVAL][key] == counted["evals"][EVAL][key]


def test_harbor_estimates_the_pass_at_k_of_rewards_of_zero_and_one_that_the_job_has(found: Any) -> None:
    assert found["jobs"]["stopped"]["pass_at_k"] == {EVAL: {"2": 1.0}}


def test_harbors_validator_accepts_each_trajectory(found: Any) -> None:
    assert [len(found["jobs"][name]["trajectories"]) for name in MADE] == [5, 2, 2]
    for name in MADE:
        for is_valid, errors, steps in found["jobs"][name]["trajectories"]:
            assert (is_valid, errors) == (True, [])
            assert steps > 0


def test_harbors_viewer_shows_jobs_with_their_rewards_and_which_did_not_end(found: Any) -> None:
    jobs = found["viewed"]["jobs"]
    assert {name: job["finished_at"] is not None for name, job in jobs.items()} == {
        "whole": True,
        "stopped": False,
        "failed": False,
    }
    assert [(job["n_completed_trials"], job["n_total_trials"]) for job in jobs.values()].count((2, 6)) == 2
    whole = jobs["whole"]
    assert (whole["agents"], whole["models"], whole["environment_type"]) == (["rollout"], ["org/tiny"], None)
    assert whole["evals"] == {EVAL: {"metrics": [{"mean": 0.5625}]}}


def test_harbors_viewer_shows_tasks_and_trials(found: Any) -> None:
    page = found["viewed"]["pages"]["whole"]
    shown = {
        task["task_name"]: (task["avg_reward"], task["n_errors"], task["avg_duration_ms"]) for task in page["tasks"]
    }
    assert shown == {
        "examples/count-lines": (0.5, 0, 16500.0),
        "examples/fix median": (1.0, 2, 120000.0),
        "examples/greet-server": (0.25, 1, None),
    }
    assert len(page["trials"]) == 6
    assert page["trial"]["environment_setup"]["finished_at"] == "2026-11-27T09:01:26Z"
    assert [step["source"] for step in page["trajectory"]["steps"]] == ["system", "user", "agent", "agent"]
    assert page["verifier"]["reward"] == {"reward": 1.0}


@pytest.mark.parametrize("form", [f"{PREFIX}{{}}.json", "{}.eval"])
def test_inspect_reads_a_log_with_its_status(found: Any, form: str) -> None:
    logs = {name: found["logs"][form.format(name)]["log"] for name in MADE}
    assert [log["status"] for log in logs.values()] == ["success", "cancelled", "error"]
    assert [len(log["samples"]) for log in logs.values()] == [6, 2, 2]
    assert [log.get("error", {}).get("message") for log in logs.values()] == [None, None, "The stream broke."]


@pytest.mark.parametrize("form", [f"{PREFIX}{{}}.json", "{}.eval"])
def test_inspect_reads_samples_and_their_summaries(found: Any, form: str) -> None:
    read = found["logs"][form.format("whole")]
    assert read["again"] == "12"
    scores = [sample.get("scores", {}).get("total_reward", {}).get("value") for sample in read["summaries"]]
    assert scores == [1.0, 0.0, None, 1.0, 0.25, None]
    assert [sample.get("error") for sample in read["summaries"]] == [
        *(None, None, "environment: The sandbox was lost.", None, None),
        "deadline_s was over before the rollout had ended.",
    ]
    assert [sample.get("limit") for sample in read["summaries"]] == [None, None, None, None, "turn", "time"]
    [metrics] = [score["metrics"] for score in read["log"]["results"]["scores"]]
    assert {name: metric["value"] for name, metric in metrics.items()} == {
        "mean": pytest.approx(0.58333, abs=1e-5),
        "pass_at_1": 0.25,
        "pass_at_2": 0.5,
    }


def test_inspect_lists_the_logs_and_would_retry_those_that_did_not_end(found: Any) -> None:
    forms = (f"{PREFIX}{{}}.json", "{}.eval")
    assert found["listed"] == sorted(form.format(name) for form in forms for name in MADE)
    assert found["retryable"] == sorted(form.format(name) for form in forms for name in ("stopped", "failed"))
