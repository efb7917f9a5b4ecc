"""An evaluation as a log of inspect-ai, in version 2 of its format: `EvalLog` as JSON, or the same in a zip (`.eval`).

Read against inspect-ai 0.3.285 (`inspect_ai/log/_log.py`, `inspect_ai/log/_recorders/eval.py`). An epoch is a rollout
of a sample. The log has no events: what happened is in `messages`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from pydantic_core import from_json

from rollout_client.contract.messages import Message
from rollout_client.contract.rollouts import SampleResult
from rollout_client.data_out.evaluation import AGENT_SECONDS, Evaluation, Trial, calls_of, facts_of, json_of
from rollout_client.data_out.training_rows import template_message
from rollout_client.results import generated_places, is_generated, last_finish_reason
from rollout_client.version import __version__

VERSION = 2
JSON, ZIP = ".json", ".eval"
OWN = "rollout"
"""Key of the evaluation's own document in the metadata of the log."""
SCORE = "total_reward"
ROLES = {"environment": "user"}
STOP_REASONS = {"stop": "stop", "length": "max_tokens", None: "unknown"}
ERRORS = {
    "deadline": "deadline_s was over before the rollout had ended.",
    "cancelled": "The rollout was cancelled.",
    "stale": "The rollout was cut off by max_staleness.",
}
SUMMARY = (
    "id",
    "epoch",
    "input",
    "target",
    "scores",
    "model_usage",
    "started_at",
    "completed_at",
    "total_time",
    "uuid",
)
"""Fields of a sample that its summary in a zip has too."""
Json = dict[str, Any]


def check_name(path: Path) -> None:
    if path.suffix not in (JSON, ZIP):
        raise ValueError(f"--results {path} must end in {JSON} or {ZIP}, which says how the log is written.")


def check_tasks(tasks: Sequence[str]) -> None:
    if len(tasks) != 1:
        raise ValueError(f"A log of inspect is of one task, and these are {', '.join(tasks)}: evaluate each by itself.")


def status_at(path: Path) -> str:
    """The status of a log of ours. Raises `KeyError`, `ValueError` or `TypeError` for anything else."""
    log = from_json(header_in(path) if path.suffix == ZIP else path.read_bytes())
    if OWN not in log["eval"]["metadata"]:
        raise KeyError(OWN)
    return str(log["status"])


def header_in(path: Path) -> bytes:
    with ZipFile(path) as members:
        return members.read("header.json")


def write(evaluation: Evaluation, path: Path, final: Path) -> None:
    """Writes the log at `path`; the name of `final` says in which form."""
    header, samples = header_of(evaluation), [sample_of(trial, evaluation) for trial in evaluation.trials]
    if final.suffix == JSON:
        path.write_bytes(json_of({**header, "samples": samples}))
        return
    with ZipFile(path, "w", ZIP_DEFLATED) as members:
        start = {"version": VERSION, "eval": header["eval"], "plan": header["plan"]}
        members.writestr("_journal/start.json", json_of(start))
        for sample in samples:
            members.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json_of(sample))
        members.writestr("summaries.json", json_of([summary_of(sample) for sample in samples]))
        members.writestr("header.json", json_of(header))


def header_of(evaluation: Evaluation) -> Json:
    """The log without its samples."""
    usages = [usage for trial in evaluation.trials if (usage := usage_of(trial)) is not None]
    total = {name: sum(usage[name] for usage in usages) for name in usages[0]} if usages else None
    stats = {
        "started_at": evaluation.begun_at.isoformat(),
        "completed_at": evaluation.ended_at.isoformat(),
        "model_usage": {} if total is None else {evaluation.model: total},
    }
    log: Json = {
        "version": VERSION,
        "status": evaluation.status,
        "eval": spec_of(evaluation),
        "plan": plan_of(evaluation),
        "stats": stats,
    }
    if evaluation.status == "success":
        log["results"] = results_of(evaluation)
    if evaluation.status == "error":
        log["error"] = error_of(evaluation.reason)
    return log


def spec_of(evaluation: Evaluation) -> Json:
    [task] = evaluation.tasks
    config: Json = {"epochs": evaluation.num_generations}
    if evaluation.num_generations > 1:
        config["epochs_reducer"] = ["mean"]
    if "max_rollout_turns" in evaluation.options:
        config["turn_limit"] = evaluation.max_rollout_turns
    return {
        "eval_id": evaluation.id.hex,
        "run_id": evaluation.id.hex,
        "created": evaluation.begun_at.isoformat(),
        "task": task,
        "task_id": evaluation.id.hex,
        "dataset": {"name": task, "samples": len(evaluation.samples), "sample_ids": evaluation.names},
        "model": evaluation.model,
        "model_generate_config": generate_config(evaluation),
        "model_base_url": evaluation.url,
        "config": config,
        "packages": {"rollout-client": __version__, "rollout-service": evaluation.info.versions.service},
        "metadata": {OWN: evaluation.document},
        "scorers": [{"name": SCORE}],
    }


def generate_config(evaluation: Evaluation) -> Json:
    """The options of sampling that were given, by inspect's names."""
    sampling: Mapping[str, Any] = evaluation.options.get("sampling") or {}
    names = {"max_new_tokens": "max_tokens", "stop_strings": "stop_seqs"}
    taken = ("temperature", "top_p", "top_k", "seed", *names)
    config = {names.get(name, name): sampling[name] for name in taken if sampling.get(name) is not None}
    if sampling.get("greedy"):
        config["temperature"] = 0.0
    return config


def plan_of(evaluation: Evaluation) -> Json:
    return {
        "name": "plan",
        "steps": [{"solver": "rollout", "params": dict(evaluation.options)}],
        "config": generate_config(evaluation),
    }


def results_of(evaluation: Evaluation) -> Json:
    """The mean reward over samples, each the mean of its rollouts, and pass@k."""
    trials = evaluation.trials
    by_row: dict[int, list[float]] = {}
    for trial in trials:
        if trial.reward is not None:
            by_row.setdefault(trial.row, []).append(trial.reward)
    metrics = {}
    if by_row:
        metrics["mean"] = sum(sum(rewards) / len(rewards) for rewards in by_row.values()) / len(by_row)
    for k, value in evaluation.pass_at_k.get(evaluation.tasks[0], {}).items():
        metrics[f"pass_at_{k}"] = value
    score: Json = {
        "name": SCORE,
        "scorer": SCORE,
        "scored_samples": len(by_row),
        "unscored_samples": len(evaluation.samples) - len(by_row),
        "metrics": {name: {"name": name, "value": value} for name, value in metrics.items()},
    }
    if evaluation.num_generations > 1:
        score["reducer"] = "mean"
    return {
        "total_samples": len(evaluation.samples) * evaluation.num_generations,
        "completed_samples": sum(failure_of(trial.result) is None for trial in trials),
        "scores": [score],
    }


def sample_of(trial: Trial, evaluation: Evaluation) -> Json:
    """One rollout."""
    result = trial.result
    messages = [chat_message(message, evaluation.model) for message in result.message_log]
    places = generated_places(result)
    asked = messages[: places[0]] if places else messages
    for message in asked:
        message["source"] = "input"
    usage = usage_of(trial)
    sample: Json = {
        "id": trial.name,
        "epoch": result.generation_index + 1,
        "input": asked,
        "target": "",
        "messages": messages,
        "output": output_of(result, messages, places, evaluation.model, usage),
        "metadata": metadata_of(trial, evaluation.model),
        "model_usage": {} if usage is None else {evaluation.model: usage},
        "completed_at": trial.ended_at.isoformat(),
        "uuid": trial.id.hex,
        "turn_count": result.metrics.turn_count,
    }
    if trial.begun_at is not None:
        sample["started_at"] = trial.begun_at.isoformat()
        sample["total_time"] = result.metrics.environment[AGENT_SECONDS]
    if trial.reward is not None:
        sample["scores"] = scores_of(trial)
    if (failure := failure_of(result)) is not None:
        sample["error"] = error_of(failure)
    if (limit := limit_of(result, evaluation)) is not None:
        sample["limit"] = limit
    return sample


def scores_of(trial: Trial) -> Json:
    """The total, and where rewards have names, each of them."""
    named = trial.rewards if trial.rewards.keys() - {"reward"} else {}
    scores: Json = {SCORE: {"value": trial.reward}} | {name: {"value": value} for name, value in named.items()}
    if trial.result.answer is not None:
        scores[SCORE]["answer"] = trial.result.answer
    return scores


def metadata_of(trial: Trial, model: str) -> Json:
    result = trial.result
    found: Json = {
        "row": trial.row,
        "status": result.status,
        "extra_env_info": result.extra_env_info,
        "metrics": result.metrics.model_dump(mode="json", exclude_none=True),
        "weight_versions": trial.weight_versions,
    }
    if result.error is not None:
        found["error"] = result.error.model_dump(mode="json")
    if result.tools:
        found["tools"] = result.tools
    if result.branches:
        found["branches"] = [
            {"messages": [chat_message(message, model) for message in branch.message_log], "rewards": branch.rewards}
            for branch in result.branches
        ]
    return found


def chat_message(message: Message, model: str) -> Json:
    given: Json = template_message(message)
    said: Json = {"role": ROLES.get(message.role, message.role), "content": given["content"]}
    if message.role == "assistant":
        if message.reasoning_content is not None:
            reasoning = {"type": "reasoning", "reasoning": message.reasoning_content}
            said["content"] = [reasoning, {"type": "text", "text": given["content"]}]
        if message.tool_calls:
            said["tool_calls"] = [
                {"id": call_id, "function": function, "arguments": arguments}
                | ({} if unread is None else {"parse_error": f"The arguments are no JSON object: {unread}"})
                for call_id, function, arguments, unread in calls_of(message)
            ]
        if is_generated(message):
            said |= {"source": "generate", "model": model}
    elif message.role == "tool":
        said |= {"tool_call_id": message.tool_call_id, "function": message.name}
    if facts := facts_of(message):
        said["metadata"] = facts
    return said


def output_of(
    result: SampleResult, messages: Sequence[Json], places: Sequence[int], model: str, usage: Json | None
) -> Json:
    """The last response."""
    if not places:
        return {"model": model}
    last = messages[places[-1]]
    stop_reason = STOP_REASONS[last_finish_reason(result)]
    if stop_reason == "stop" and last.get("tool_calls"):
        stop_reason = "tool_calls"
    return {"model": model, "choices": [{"message": last, "stop_reason": stop_reason}], "usage": usage}


def usage_of(trial: Trial) -> Json | None:
    """`None` where the tokens of the inputs are not known."""
    if trial.input_tokens is None:
        return None
    generated = trial.result.metrics.assistant_tokens
    return {
        "input_tokens": trial.input_tokens,
        "output_tokens": generated,
        "total_tokens": trial.input_tokens + generated,
    }


def failure_of(result: SampleResult) -> str | None:
    """Why the rollout has no final reward; `None` where it has one."""
    if result.error is not None:
        return f"{result.error.kind}: {result.error.message}"
    return ERRORS.get(result.status)


def error_of(message: str) -> Json:
    return {"message": message, "traceback": "", "traceback_ansi": ""}


def limit_of(result: SampleResult, evaluation: Evaluation) -> Json | None:
    limits = {
        "truncated": ("context", evaluation.max_seq_len),
        "max_turns": ("turn", evaluation.max_rollout_turns),
        "deadline": ("time", evaluation.options.get("deadline_s")),
    }
    kind, limit = limits.get(result.status, ("", None))
    return None if limit is None else {"type": kind, "limit": limit}


def summary_of(sample: Json) -> Json:
    """The sample as a list of samples shows it."""
    found = {name: sample[name] for name in SUMMARY if name in sample}
    if "error" in sample:
        found["error"] = sample["error"]["message"]
    if "limit" in sample:
        found["limit"] = sample["limit"]["type"]
    return {
        **found,
        "completed": True,
        "message_count": len(sample["messages"]),
        "turn_count": sample["turn_count"],
    }
