"""Evaluations in the formats of Harbor and inspect: their fields; `tests/sockets/test_evaluators.py` has them read."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_client.data_out.evaluation import Evaluation
from rollout_client.data_out.evaluation_file import EvaluationFile
from tests.clients.data_out.evaluations import ARRIVED, BEGUN, CALL, SAMPLES, evaluation, groups, interrupted, of_row
from tests.clients.message_logs import generated, given_message

FIRST, LOST, LATE, CUT = (
    "examples-count-lines__0-1",
    "examples-fix-median__1-1",
    "examples-fix-median__1-2",
    "examples-greet-server__2-1",
)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def job(folder: Path, written: Evaluation | None = None) -> Path:
    path = folder / "job"
    EvaluationFile(path, "harbor", overwrite=True).write(written or evaluation())
    return path


def log(folder: Path, written: Evaluation | None = None) -> Any:
    path = folder / "log.json"
    EvaluationFile(path, "inspect", overwrite=True).write(written or evaluation())
    return read(path)


def at(seconds: float) -> str:
    return (BEGUN + timedelta(seconds=seconds)).isoformat()


# Harbor


def test_a_job_of_harbor_counts_trials_rewards_tokens_and_what_went_wrong(tmp_path: Path) -> None:
    result = read(job(tmp_path) / "result.json")
    assert (result["started_at"], result["updated_at"], result["finished_at"]) == (at(0), at(160), at(160))
    assert result["n_total_trials"] == 6
    assert result["stats"] == {
        "n_completed_trials": 6,
        "n_errored_trials": 3,
        "n_pending_trials": 0,
        "n_cancelled_trials": 0,
        "n_input_tokens": 16,
        "n_output_tokens": 6,
        "evals": {
            "rollout__org/tiny__terminal": {
                "n_trials": 4,
                "n_errors": 3,
                "metrics": [{"mean": 0.5625}],
                "pass_at_k": {"1": 0.25, "2": 0.5},
                "reward_stats": {"reward": {"1.0": [FIRST, LATE], "0.0": ["examples-count-lines__0-2"], "0.25": [CUT]}},
                "exception_stats": {
                    "RolloutEnvironmentError": [LOST],
                    "AgentTimeoutError": [LATE],
                    "RolloutDeadlineError": ["examples-greet-server__2-2"],
                },
            }
        },
    }


def test_a_trial_of_harbor_has_its_task_model_tokens_reward_and_the_times_of_its_phases(tmp_path: Path) -> None:
    path = job(tmp_path)
    trial = read(path / FIRST / "result.json")
    assert (trial["task_name"], trial["trial_name"], trial["source"]) == ("examples/count-lines", FIRST, "terminal")
    assert trial["trial_uri"] == (path / FIRST).as_uri()
    assert trial["agent_info"] == {
        "name": "rollout",
        "version": "0.9",
        "model_info": {"name": "org/tiny", "provider": "rollout"},
    }
    assert (trial["agent_result"]["n_input_tokens"], trial["agent_result"]["n_output_tokens"]) == (10, 3)
    assert trial["agent_result"]["metadata"]["weight_versions"] == ["7"]
    assert (
        trial["verifier_result"]
        == {"rewards": {"reward": 1.0}}
        == {"rewards": read(path / FIRST / "verifier/reward.json")}
    )
    assert "exception_info" not in trial
    assert (trial["started_at"], trial["finished_at"]) == (at(83.5), at(100))
    phases = {name: trial[name] for name in ("environment_setup", "agent_execution", "verifier")}
    assert phases == {
        "environment_setup": {"started_at": at(84), "finished_at": at(86)},
        "agent_execution": {"started_at": at(86), "finished_at": at(96)},
        "verifier": {"started_at": at(96), "finished_at": at(99)},
    }
    assert trial["config"] == read(path / FIRST / "config.json")
    assert read(path / "config.json")["n_attempts"] == 2


def test_a_trial_without_a_reward_says_what_failed_and_has_no_verifiers_result(tmp_path: Path) -> None:
    path = job(tmp_path)
    lost = read(path / LOST / "result.json")
    assert lost["exception_info"] == {
        "exception_type": "RolloutEnvironmentError",
        "exception_message": "The sandbox was lost.",
        "exception_traceback": "",
        "occurred_at": at(100),
    }
    assert "verifier_result" not in lost
    assert not (path / LOST / "verifier").exists()
    assert (path / LOST / "exception.txt").read_text() == "The sandbox was lost."
    late = read(path / LATE / "result.json")
    assert (late["exception_info"]["exception_type"], late["verifier_result"]) == (
        "AgentTimeoutError",
        {"rewards": {"reward": 1.0}},
    )


def test_a_trajectory_has_a_step_for_each_message_with_the_tokens_of_the_policy(tmp_path: Path) -> None:
    told = read(job(tmp_path) / FIRST / "agent" / "trajectory.json")
    system, prompt, calls, answer = told["steps"]
    assert (system["source"], prompt["source"], prompt["message"]) == ("system", "user", "Count the lines.")
    assert (calls["step_id"], calls["source"], calls["message"], calls["reasoning_content"]) == (
        *(3, "agent"),
        *("Looking.", "Look."),
    )
    assert calls["tool_calls"] == [
        {"tool_call_id": "c1", "function_name": "bash", "arguments": {"script": "ls"}},
        {"tool_call_id": "c2", "function_name": "bash", "arguments": {}, "extra": {"arguments": "[1"}},
    ]
    assert calls["observation"]["results"] == [
        {"content": "12 a.txt", "source_call_id": "c1", "extra": {"name": "bash"}},
        {"content": "Time is short.", "extra": {"role": "environment"}},
    ]
    assert calls["metrics"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "completion_token_ids": [3, 4],
        "logprobs": [-0.5, -0.5],
    }
    assert answer["metrics"]["prompt_tokens"] == 7
    assert answer["extra"] == {"reward": 1.0, "finish_reason": "length"}
    [branch] = told["subagent_trajectories"]
    assert (branch["trajectory_id"], len(branch["steps"])) == ("branch-1", 2)
    assert told["final_metrics"] == {"total_prompt_tokens": 10, "total_completion_tokens": 3}


def test_an_answer_of_a_tool_that_nothing_called_names_no_call(tmp_path: Path) -> None:
    stray = {**given_message(5, role="tool"), "content": "?", "tool_call_id": "c9"}
    played = {0: [of_row(0, 0, given_message(1), generated(2), stray)]}
    path = job(tmp_path, evaluation(groups=played))
    [result] = read(path / FIRST / "agent" / "trajectory.json")["steps"][1]["observation"]["results"]
    assert result == {"content": "?", "extra": {"tool_call_id": "c9"}}


def test_a_response_that_the_prompt_brought_is_context_and_none_of_the_policy(tmp_path: Path) -> None:
    shown = given_message(1, role="assistant")
    written = evaluation(groups={0: [of_row(0, 0, given_message(3), shown, given_message(4), generated(2))]})
    steps = read(job(tmp_path, written) / FIRST / "agent" / "trajectory.json")["steps"]
    assert [(step.get("is_copied_context"), "metrics" in step) for step in steps] == [
        (None, False),
        (True, False),
        (None, False),
        (None, True),
    ]
    [sample] = log(tmp_path, written)["samples"]
    assert [message.get("source") for message in sample["messages"]] == ["input", "input", "input", "generate"]


def test_several_rewards_have_their_own_means(tmp_path: Path) -> None:
    played = {
        row: [of_row(row, 0, given_message(1), generated(2), rewards={"style": row / 2, "tests": 1.0})]
        for row in (0, 1)
    }
    stats = read(job(tmp_path, evaluation(groups=played)) / "result.json")["stats"]
    assert stats["evals"]["rollout__org/tiny__terminal"]["metrics"] == [{"style": 0.25, "tests": 1.0}]


# inspect


def test_a_log_of_inspect_says_what_was_played_and_the_result(tmp_path: Path) -> None:
    written = log(tmp_path)
    assert (written["version"], written["status"]) == (2, "success")
    spec = written["eval"]
    assert (spec["task"], spec["model"], spec["model_base_url"]) == (
        "terminal",
        "rollout/org/tiny",
        "http://127.0.0.1:8000",
    )
    assert spec["model_generate_config"] == {"temperature": 0.0, "max_tokens": 32, "stop_seqs": ["END"]}
    assert spec["config"] == {"epochs": 2, "epochs_reducer": ["mean"], "turn_limit": 4}
    assert spec["dataset"]["sample_ids"] == [sample["id"] for sample in SAMPLES]
    assert spec["metadata"]["rollout"] == {"versions": ["7"], "passes_at": 1.0}
    assert written["stats"] == {
        "started_at": at(0),
        "completed_at": at(160),
        "model_usage": {"rollout/org/tiny": {"input_tokens": 16, "output_tokens": 6, "total_tokens": 22}},
    }
    [score] = written["results"]["scores"]
    # The first sample has 1 and 0, the second 1 alone, the third 0.25 alone.
    assert score["metrics"]["mean"]["value"] == pytest.approx((0.5 + 1.0 + 0.25) / 3)
    assert (score["metrics"]["pass_at_2"]["value"], score["reducer"]) == (0.5, "mean")
    assert (written["results"]["total_samples"], written["results"]["completed_samples"]) == (6, 4)


def test_a_sample_of_inspect_has_messages_output_score_usage_and_times(tmp_path: Path) -> None:
    first = log(tmp_path)["samples"][0]
    assert (first["id"], first["epoch"], first["turn_count"]) == ("examples/count-lines", 1, 2)
    assert [message["role"] for message in first["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "user",
        "assistant",
    ]
    assert first["input"] == first["messages"][:2]
    assert {message["source"] for message in first["input"]} == {"input"}
    calls = first["messages"][2]
    assert calls["content"] == [{"type": "reasoning", "reasoning": "Look."}, {"type": "text", "text": "Looking."}]
    assert calls["tool_calls"] == [
        {"id": "c1", "function": "bash", "arguments": {"script": "ls"}},
        {"id": "c2", "function": "bash", "arguments": {}, "parse_error": "The arguments are no JSON object: [1"},
    ]
    assert (first["messages"][3]["tool_call_id"], first["messages"][3]["function"]) == ("c1", "bash")
    assert first["messages"][4]["metadata"] == {"role": "environment"}
    assert first["output"]["choices"] == [{"message": first["messages"][5], "stop_reason": "max_tokens"}]
    assert first["scores"] == {"total_reward": {"value": 1.0, "answer": "12"}}
    assert first["model_usage"] == {"rollout/org/tiny": {"input_tokens": 10, "output_tokens": 3, "total_tokens": 13}}
    assert (first["started_at"], first["completed_at"], first["total_time"]) == (at(83.5), at(100), 16.5)
    assert (first["metadata"]["status"], first["metadata"]["weight_versions"]) == ("completed", ["7"])
    assert len(first["metadata"]["branches"]) == 1


@pytest.mark.parametrize(
    ("fields", "stop_reason"),
    [
        ({"finish_reason": "stop"}, "stop"),
        ({"finish_reason": "stop", "tool_calls": [CALL]}, "tool_calls"),
        ({"finish_reason": "length", "tool_calls": [CALL]}, "max_tokens"),
        ({}, "unknown"),
    ],
)
def test_the_output_says_why_the_last_response_ended(tmp_path: Path, fields: Any, stop_reason: str) -> None:
    [sample] = log(tmp_path, evaluation(groups={0: [of_row(0, 0, given_message(1), generated(2, **fields))]}))[
        "samples"
    ]
    [choice] = sample["output"]["choices"]
    assert choice["stop_reason"] == stop_reason


def test_samples_without_a_final_reward_have_errors_and_limits_and_no_score(tmp_path: Path) -> None:
    _, _, lost, late, cut, deadline = log(tmp_path)["samples"]
    assert lost["error"] == {"message": "environment: The sandbox was lost.", "traceback": "", "traceback_ansi": ""}
    assert "scores" not in lost
    assert "error" not in late
    assert (cut["limit"], cut["scores"]["total_reward"]["value"]) == ({"type": "turn", "limit": 4}, 0.25)
    assert deadline["limit"] == {"type": "time", "limit": 30.0}
    assert deadline["error"]["message"] == "deadline_s was over before the rollout had ended."
    assert "scores" not in deadline


def test_named_rewards_are_scores_beside_the_total(tmp_path: Path) -> None:
    played = {0: [of_row(0, 0, given_message(1), generated(2), rewards={"style": 0.25, "tests": 0.75})]}
    [sample] = log(tmp_path, evaluation(groups=played))["samples"]
    assert {name: score["value"] for name, score in sample["scores"].items()} == {
        "total_reward": 1.0,
        "style": 0.25,
        "tests": 0.75,
    }


def test_usage_is_left_out_where_the_tokens_of_inputs_are_not_known(tmp_path: Path) -> None:
    played = {0: [of_row(0, 0, given_message(1), generated(2))]}
    written = evaluation(groups=played)
    read_log = log(tmp_path, written)
    assert (read_log["samples"][0]["model_usage"], read_log["stats"]["model_usage"]) == ({}, {})
    assert read(job(tmp_path, written) / FIRST / "result.json")["agent_result"]["n_input_tokens"] is None


def test_a_log_in_a_zip_has_the_header_the_samples_and_their_summaries(tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    written = evaluation()
    EvaluationFile(path, "inspect").write(written)
    plain = log(tmp_path, written)
    with ZipFile(path) as members:
        names = members.namelist()
        header, summaries, first = (
            json.loads(members.read(name))
            for name in ("header.json", "summaries.json", "samples/examples/count-lines_epoch_1.json")
        )
    assert len(names) == 3 + 6
    assert {**header, "samples": plain["samples"]} == plain
    assert first == plain["samples"][0]
    assert [(each["id"], each["epoch"], each["completed"]) for each in summaries] == [
        (each["id"], each["epoch"], True) for each in plain["samples"]
    ]
    assert (summaries[2]["error"], summaries[4]["limit"]) == ("environment: The sandbox was lost.", "turn")


# Both


def test_an_interrupted_evaluation_says_so_in_each_format(tmp_path: Path) -> None:
    result = read(job(tmp_path, interrupted()) / "result.json")
    assert (result["finished_at"], result["n_total_trials"], result["stats"]["n_pending_trials"]) == (None, 6, 4)
    assert read(tmp_path / "job" / "rollout.json") == {
        **{"versions": ["7"], "passes_at": 1.0},
        **{"status": "cancelled", "reason": "Stopped by the user."},
    }
    cancelled = log(tmp_path, interrupted())
    assert (cancelled["status"], "results" in cancelled, "error" in cancelled) == ("cancelled", False, False)
    broken = log(tmp_path, interrupted(status="error", reason="The stream broke."))
    assert (broken["status"], broken["error"]["message"]) == ("error", "The stream broke.")


def test_samples_without_ids_of_their_own_are_named_by_their_rows(tmp_path: Path) -> None:
    named = [{**sample, "id": each} for sample, each in zip(SAMPLES, ("a", "a", None), strict=True)]
    written = log(tmp_path, evaluation(samples=named))
    assert written["eval"]["dataset"]["sample_ids"] == ["a#0", "a#1", "terminal#2"]


@example(["", "t#0"])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), min_size=1, max_size=4))
def test_no_two_samples_have_one_name_or_one_folder(ids: list[str]) -> None:
    samples = [{"id": each, "task_name": "t"} for each in ids]
    played = {row: [groups()[0][0]] for row in range(len(ids))}
    trials = evaluation(samples=samples, groups=played).trials
    names = [trial.name for trial in trials]
    assert len(set(names)) == len({trial.id for trial in trials}) == len(ids)


def test_rollouts_of_an_earlier_command_have_ended_when_this_one_began() -> None:
    assert {trial.ended_at for trial in evaluation(arrivals={(0, 0): ARRIVED}).trials} == {ARRIVED, BEGUN}


@pytest.mark.parametrize(
    ("name", "format", "sentence"),
    [
        ("log.txt", "inspect", "must end in .json or .eval, which says how the log is written."),
        ("job.json", "harbor", "is the name of a file, and a job of Harbor is a folder: name one."),
        ("no/job", "harbor", "there is no folder"),
    ],
)
def test_a_path_that_does_not_fit_is_refused(tmp_path: Path, name: str, format: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        EvaluationFile(tmp_path / name, format)


@pytest.mark.parametrize(("name", "format"), [("job", "harbor"), ("log.json", "inspect"), ("log.eval", "inspect")])
def test_results_stay_unless_they_did_not_come_to_an_end(tmp_path: Path, name: str, format: Any) -> None:
    path = tmp_path / name
    EvaluationFile(path, format).write(interrupted())
    # A kill left what it had written.
    (tmp_path / f"{name}.new").mkdir()
    EvaluationFile(path, format).write(evaluation())
    with pytest.raises(ValueError, match="has the results of an evaluation: name another path, or replace them"):
        EvaluationFile(path, format)
    EvaluationFile(path, format, overwrite=True).write(interrupted())
    assert sorted(each.name for each in tmp_path.iterdir()) == [name]


@pytest.mark.parametrize(
    ("name", "format", "content"),
    [
        ("job", "harbor", None),
        ("log.json", "inspect", b'{"eval": {"metadata": {}}, "status": "cancelled"}'),
        ("log.json", "inspect", b"[]"),
        ("log.eval", "inspect", b"no zip"),
    ],
)
def test_what_others_have_written_stays_even_when_overwriting(
    tmp_path: Path, name: str, format: Any, content: bytes | None
) -> None:
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match="exists, and rollout eval did not write it in the format"):
        EvaluationFile(path, format, overwrite=True)


def test_a_log_of_inspect_is_of_one_task(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is of one task, and these are math, code: evaluate each by itself"):
        EvaluationFile(tmp_path / "log.json", "inspect").check(["math", "code"])
    EvaluationFile(tmp_path / "job", "harbor").check(["math", "code"])
