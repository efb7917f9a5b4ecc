"""An evaluation as the folder of a job of Harbor, as its viewer and its models read it.

    config.json  result.json  rollout.json
    TRIAL/config.json  TRIAL/result.json  TRIAL/agent/trajectory.json  TRIAL/verifier/reward.json  TRIAL/exception.txt

Read against Harbor 0.26 (`harbor/models/job`, `harbor/models/trial`, `harbor/models/trajectories`, which is ATIF 1.8).
`rollout.json` is our own: what the others have no place for. A job without `finished_at` did not come to its end.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from rollout_client.contract.messages import Message
from rollout_client.data_out.evaluation import (
    PHASES,
    PROVIDER,
    Evaluation,
    Trial,
    calls_of,
    facts_of,
    file_name,
    json_of,
)
from rollout_client.data_out.training_rows import template_message
from rollout_client.results import is_generated

OWN_FILE = "rollout.json"
AGENT = "rollout"
"""Name of the agent: which one a task of the service has is not known here."""
PHASE_NAMES = dict(zip(PHASES, ("environment_setup", "agent_execution", "verifier"), strict=False))
CANCELLED = "CancelledError"
"""The type that Harbor counts as cancelled."""
EXCEPTIONS = {"deadline": "RolloutDeadlineError", "cancelled": CANCELLED, "stale": "RolloutStaleError"}
GRADED_EXCEPTIONS = {"agent_timed_out": "AgentTimeoutError", "agent_failed": "RolloutAgentFailedError"}
"""By the metric of a rollout whose agent did not end well, and was judged by what it has left."""
ENVIRONMENT = {"import_path": "rollout"}
"""Where trials run is known to the service alone; Harbor's own default would say Docker."""
Json = dict[str, Any]


def check_name(path: Path) -> None:
    if path.suffix in (".json", ".eval"):
        raise ValueError(f"--results {path} is the name of a file, and a job of Harbor is a folder: name one.")


def check_tasks(tasks: Sequence[str]) -> None:
    """A job may have any tasks."""


def status_at(path: Path) -> str:
    """The status of a job of ours. Raises `OSError`, `KeyError`, `ValueError` or `TypeError` for anything else."""
    return str(from_json((path / OWN_FILE).read_bytes())["status"])


def write(evaluation: Evaluation, path: Path, final: Path) -> None:
    """Writes the job into the folder `path`, which is to be `final`."""
    path.mkdir()
    files: Json = {"config.json": job_config(evaluation, final), OWN_FILE: own_document(evaluation)}
    results = []
    for trial in evaluation.trials:
        result = trial_result(trial, evaluation, final)
        results.append(result)
        name = result["trial_name"]
        files |= {f"{name}/config.json": result["config"], f"{name}/result.json": result}
        if trial.result.message_log:
            files[f"{name}/agent/trajectory.json"] = trajectory(trial, evaluation)
        if trial.rewards:
            files[f"{name}/verifier/reward.json"] = trial.rewards
        if (exception := result.get("exception_info")) is not None:
            files[f"{name}/exception.txt"] = exception["exception_message"]
    files["result.json"] = job_result(evaluation, results)
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content.encode() if isinstance(content, str) else json_of(content))


def own_document(evaluation: Evaluation) -> Json:
    return {**evaluation.document, "status": evaluation.status, "reason": evaluation.reason}


def agent_config(evaluation: Evaluation) -> Json:
    return {"name": AGENT, "model_name": evaluation.model, "base_url": evaluation.url}


def job_config(evaluation: Evaluation, final: Path) -> Json:
    return {
        "job_name": final.name,
        "jobs_dir": str(final.parent),
        "n_attempts": evaluation.num_generations,
        "agents": [agent_config(evaluation)],
        "environment": ENVIRONMENT,
        "datasets": [{"name": task} for task in evaluation.tasks],
    }


def job_result(evaluation: Evaluation, results: Sequence[Json]) -> Json:
    total = len(evaluation.samples) * evaluation.num_generations
    is_over = evaluation.status == "success"
    errors = [result["exception_info"]["exception_type"] for result in results if "exception_info" in result]
    stats: Json = {
        "n_completed_trials": len(results),
        "n_errored_trials": len(errors),
        "n_pending_trials": total - len(results),
        "n_cancelled_trials": errors.count(CANCELLED),
        "evals": {
            f"{AGENT}__{evaluation.info.model.name}__{task}": dataset_stats(
                [result for result in results if result["source"] == task], evaluation.pass_at_k.get(task, {})
            )
            for task in evaluation.tasks
        },
    }
    for name in ("n_input_tokens", "n_output_tokens"):
        counts = [result["agent_result"][name] for result in results]
        known = [count for count in counts if count is not None]
        stats[name] = sum(known) if known else None
    return {
        "id": str(evaluation.id),
        "started_at": evaluation.begun_at.isoformat(),
        "updated_at": evaluation.ended_at.isoformat(),
        "finished_at": evaluation.ended_at.isoformat() if is_over else None,
        "n_total_trials": total,
        "stats": stats,
    }


def dataset_stats(results: Sequence[Json], pass_at_k: Mapping[int, float]) -> Json:
    """The trials of one task of the service."""
    reward_stats: dict[str, dict[str, list[str]]] = {}
    exception_stats: dict[str, list[str]] = {}
    graded = [result for result in results if "verifier_result" in result]
    for result in graded:
        for name, value in result["verifier_result"]["rewards"].items():
            reward_stats.setdefault(name, {}).setdefault(str(value), []).append(result["trial_name"])
    for result in results:
        if "exception_info" in result:
            kind = result["exception_info"]["exception_type"]
            exception_stats.setdefault(kind, []).append(result["trial_name"])
    return {
        "n_trials": len(graded),
        "n_errors": sum(map(len, exception_stats.values())),
        "metrics": [means_of([result["verifier_result"]["rewards"] for result in graded])] if graded else [],
        "pass_at_k": {str(k): value for k, value in pass_at_k.items()},
        "reward_stats": reward_stats,
        "exception_stats": exception_stats,
    }


def means_of(rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Over the trials that have rewards. One reward is under `mean`, as Harbor has it; several by their names."""
    names = sorted({name for each in rewards for name in each})
    means = {}
    for name in names:
        values = [each[name] for each in rewards if name in each]
        means["mean" if len(names) == 1 else name] = sum(values) / len(values)
    return means


def trial_result(trial: Trial, evaluation: Evaluation, final: Path) -> Json:
    result = trial.result
    name = f"{file_name(trial.name)}__{trial.row}-{result.generation_index + 1}"
    # A path that is the name of the task: where it lies is known to the service alone.
    task = {"path": trial.name}
    found: Json = {
        "id": str(trial.id),
        "task_name": trial.name,
        "trial_name": name,
        "trial_uri": (final / name).as_uri(),
        "task_id": task,
        "source": result.task_name,
        "task_checksum": hashlib.sha256(json_of(evaluation.samples[trial.row])).hexdigest(),
        "config": {
            "task": {**task, "source": result.task_name},
            "trial_name": name,
            "trials_dir": str(final),
            "agent": agent_config(evaluation),
            "environment": ENVIRONMENT,
            "job_id": str(evaluation.id),
        },
        "agent_info": {
            "name": AGENT,
            "version": evaluation.info.versions.service,
            "model_info": {"name": evaluation.info.model.name, "provider": PROVIDER},
        },
        "agent_result": {
            "n_input_tokens": trial.input_tokens,
            "n_output_tokens": result.metrics.assistant_tokens,
            "metadata": {
                "status": result.status,
                "total_reward": trial.reward,
                "weight_versions": trial.weight_versions,
                "metrics": result.metrics.model_dump(mode="json", exclude_none=True),
            },
        },
        "finished_at": trial.ended_at.isoformat(),
    }
    if trial.begun_at is not None:
        found["started_at"] = trial.begun_at.isoformat()
    for phase, (begin, end) in trial.phases.items():
        if phase in PHASE_NAMES:
            found[PHASE_NAMES[phase]] = {"started_at": begin.isoformat(), "finished_at": end.isoformat()}
    if trial.rewards:
        found["verifier_result"] = {"rewards": trial.rewards}
    if (exception := exception_of(trial)) is not None:
        kind, message = exception
        found["exception_info"] = {
            "exception_type": kind,
            "exception_message": message,
            "exception_traceback": "",
            "occurred_at": trial.ended_at.isoformat(),
        }
    return found


def exception_of(trial: Trial) -> tuple[str, str] | None:
    """Type and message of what went wrong, beside a reward or in its place."""
    result = trial.result
    if result.error is not None:
        return f"Rollout{result.error.kind.capitalize()}Error", result.error.message
    if result.status in EXCEPTIONS:
        return EXCEPTIONS[result.status], f"The rollout ended with status {result.status}."
    for metric, kind in GRADED_EXCEPTIONS.items():
        if result.metrics.environment.get(metric):
            return kind, f"The agent was judged by what it had left ({metric})."
    return None


def trajectory(trial: Trial, evaluation: Evaluation) -> Json:
    """The rollout in the Agent Trajectory Interchange Format; branches are embedded as trajectories of subagents."""
    result = trial.result
    agent: Json = {"name": AGENT, "version": evaluation.info.versions.service, "model_name": evaluation.model}
    if result.tools:
        agent["tool_definitions"] = result.tools
    document: Json = {
        "schema_version": "ATIF-v1.8",
        "session_id": str(trial.id),
        "agent": agent,
        "steps": steps_of(result.message_log),
        "final_metrics": {
            "total_prompt_tokens": trial.input_tokens,
            "total_completion_tokens": result.metrics.assistant_tokens,
        },
        "extra": {"status": result.status, "rewards": trial.rewards, "weight_versions": trial.weight_versions},
    }
    branches = [branch for branch in result.branches if branch.message_log]
    if branches:
        document["subagent_trajectories"] = [
            {
                "schema_version": "ATIF-v1.8",
                "trajectory_id": f"branch-{number}",
                "agent": agent,
                "steps": steps_of(branch.message_log),
                "extra": {"rewards": branch.rewards, "shared_messages": branch.shared_messages},
            }
            for number, branch in enumerate(branches, start=1)
        ]
    return document


def steps_of(log: Sequence[Message]) -> list[Json]:
    """A step for each message; answers of tools and of the environment belong to the step of the agent before them."""
    steps: list[Json] = []
    length = 0
    for message in log:
        observes = message.role in ("tool", "environment")
        if observes and steps and steps[-1]["source"] == "agent":
            steps[-1].setdefault("observation", {"results": []})["results"].append(observation(message, steps[-1]))
        else:
            steps.append({"step_id": len(steps) + 1, **dict(step_fields(message, length))})
        length += len(message.token_ids)
    return steps


def step_fields(message: Message, length: int) -> Iterator[tuple[str, Any]]:
    """Fields of a step. `length` is how many tokens come before the message."""
    yield "source", {"assistant": "agent", "system": "system"}.get(message.role, "user")
    yield "message", template_message(message)["content"]
    if facts := facts_of(message):
        yield "extra", facts
    if message.role != "assistant":
        return
    if message.reasoning_content is not None:
        yield "reasoning_content", message.reasoning_content
    if calls := list(calls_of(message)):
        yield (
            "tool_calls",
            [
                {"tool_call_id": call_id, "function_name": function, "arguments": arguments}
                | ({} if unread is None else {"extra": {"arguments": unread}})
                for call_id, function, arguments, unread in calls
            ],
        )
    if is_generated(message):
        yield (
            "metrics",
            {
                "prompt_tokens": length,
                "completion_tokens": len(message.token_ids),
                "completion_token_ids": message.token_ids,
                "logprobs": message.generation_logprobs,
            },
        )
    else:
        yield "is_copied_context", True


def observation(message: Message, step: Json) -> Json:
    """The result of a call of the step, by its id, or of none of them."""
    found: Json = {"content": message.content}
    called = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    facts: Json = facts_of(message)
    if message.tool_call_id in called:
        found["source_call_id"] = message.tool_call_id
    elif message.tool_call_id is not None:
        facts["tool_call_id"] = message.tool_call_id
    return {**found, **({"extra": facts} if facts else {})}
