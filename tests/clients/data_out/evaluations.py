"""An evaluation that has each thing which a format of another evaluator has a place for, or none."""

from datetime import UTC, datetime, timedelta
from typing import Any

from rollout_client import SampleResult
from rollout_client.contract.info import ServiceInfo
from rollout_client.data_out.evaluation import Evaluation
from tests.clients.message_logs import failed, generated, given_message, rollout
from tests.clients.scripted_service import Json

INFO: Json = {
    "model": {"name": "org/tiny", "vocab_size": 270, "max_model_len": 4096},
    "tokenizer": {
        "vocabulary_sha256": "v",
        "vocabulary_size": 262,
        "encodings": [],
        "chat_template_sha256": None,
        "rendered_chat": None,
    },
    "limits": {},
    "versions": {"service": "0.9", "contract": "1.4", "engine": "vllm 1", "ray": "2", "transformers": "5"},
    "policy_version": 7,
    "tasks": ["terminal"],
}
BEGUN = datetime(2026, 11, 27, 9, 0, tzinfo=UTC)
ARRIVED = BEGUN + timedelta(seconds=100)
ENDED = BEGUN + timedelta(seconds=160)
ARRIVALS = {(row, generation): ARRIVED for row in range(3) for generation in range(2)}
SPANS = [{"version": "7", "start": 0, "end": 2}]
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"script": "ls"}'}}
UNREAD = {"id": "c2", "type": "function", "function": {"name": "bash", "arguments": "[1"}}
PROMPT = {**given_message(1, 2), "content": "Count the lines."}
SAMPLES: list[Json] = [
    {"idx": 0, "id": "examples/count-lines", "task_name": "terminal", "messages": [{"role": "user", "content": "Go"}]},
    {"idx": 1, "id": "examples/fix median", "task_name": "terminal", "messages": [{"role": "user", "content": "Fix"}]},
    {"idx": 2, "id": "examples/greet-server", "task_name": "terminal", "messages": [{"role": "user", "content": "Hi"}]},
]
TURNS = [
    {**given_message(8, role="system"), "content": "Be brief."},
    PROMPT,
    generated(
        3,
        4,
        content="<think>Look.</think><call>ls</call>",
        parsed_content="Looking.",
        reasoning_content="Look.",
        tool_calls=[CALL, UNREAD],
        finish_reason="stop",
        weight_versions=SPANS,
    ),
    {**given_message(5, role="tool"), "content": "12 a.txt", "name": "bash", "tool_call_id": "c1"},
    {**given_message(6, role="environment"), "content": "Time is short."},
    generated(7, content="12", finish_reason="length", reward=1.0),
]
SECONDS = {
    "sandbox_create_s": 2.0,
    "agent_run_s": 10.0,
    "verifier_s": 3.0,
    "sandbox_destroy_s": 1.0,
    "agent_s": 16.5,
}


def metrics(turns: list[int], inputs: list[int], **environment: float) -> Json:
    return {
        "turn_count": len(turns),
        "total_tokens": sum(turns) + 2,
        "assistant_tokens": sum(turns),
        "env_tokens": 2,
        "terminated": True,
        "truncated": False,
        "max_turns_reached": False,
        "total_reward": None,
        "turn_gen_tokens": turns,
        "turn_input_tokens": inputs,
        "environment": environment,
    }


def of_row(row: int, generation: int, *log: Json, **fields: Any) -> SampleResult:
    given = {"task_name": "terminal", "idx": row, "id": SAMPLES[row]["id"], "generation_index": generation}
    return rollout(*log, **(given | fields))


def groups() -> dict[int, list[SampleResult]]:
    """A right and a wrong rollout; one of a failed sandbox, one whose agent took too long; one that was cut off."""
    asked = generated(9, content="?", finish_reason="stop")
    branch = {"message_log": [PROMPT, asked], "rewards": {"reward": 0.5}}
    solved = of_row(
        0,
        0,
        *TURNS,
        answer="12",
        branches=[branch],
        metrics=metrics([2, 1], [3, 7], **SECONDS),
        tools=[{"type": "f"}],
    )
    wrong = of_row(0, 1, PROMPT, asked, reward=0.0, metrics=metrics([1], [2], **SECONDS))
    of_second = {"task_name": "terminal", "idx": 1, "id": SAMPLES[1]["id"]}
    lost = failed(
        PROMPT,
        **of_second,
        error={"kind": "environment", "message": "The sandbox was lost.", "retryable": True},
        metrics=metrics([], []),
    )
    late = of_row(1, 1, PROMPT, asked, metrics=metrics([1], [2], agent_timed_out=1.0, agent_s=120.0))
    cut = of_row(2, 0, PROMPT, asked, reward=0.25, status="max_turns", metrics=metrics([1], [2]))
    deadline = of_row(2, 1, status="deadline", metrics=metrics([], []))
    return {0: [solved, wrong], 1: [lost, late], 2: [cut, deadline]}


def evaluation(**fields: Any) -> Evaluation:
    given: dict[str, Any] = {
        "samples": SAMPLES,
        "groups": groups(),
        "arrivals": ARRIVALS,
        "options": {
            "num_generations": 2,
            "max_rollout_turns": 4,
            "deadline_s": 30.0,
            "sampling": {"greedy": True, "max_new_tokens": 32, "stop_strings": ["END"]},
        },
        "url": "http://127.0.0.1:8000",
        "info": ServiceInfo.model_validate(INFO),
        "begun_at": BEGUN,
        "ended_at": ENDED,
        "pass_at_k": {"terminal": {1: 0.25, 2: 0.5}},
        "document": {"versions": ["7"], "passes_at": 1.0},
    }
    return Evaluation(**(given | fields))


def interrupted(**fields: Any) -> Evaluation:
    """Only the first sample was played."""
    played = {0: groups()[0]}
    return evaluation(**({"groups": played, "status": "cancelled", "reason": "Stopped by the user."} | fields))
