"""Mutated bodies against the routes of agents: a model server's APIs, and sessions. They need a real engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.endurance.fuzz.bodies import as_json
from tests.endurance.fuzz.fuzzed_service import SERVED_MODEL

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": [{"type": "text", "text": "And 2 + 2?"}]},
]
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CHAT = {
    "model": SERVED_MODEL,
    "messages": MESSAGES,
    "max_tokens": 4,
    "n": 2,
    "seed": 5,
    "temperature": 0.7,
    "stop": ["!"],
    "logprobs": True,
    "top_logprobs": 2,
}
TOOL_CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"expression": "1"}'}}
WITH_TOOLS = {
    "model": SERVED_MODEL,
    "messages": [
        MESSAGES[1],
        {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
        {"role": "tool", "tool_call_id": "call-1", "content": "2"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}],
    "max_tokens": 4,
}
WITH_SCHEMA = {
    "model": SERVED_MODEL,
    "messages": MESSAGES[1:2],
    "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}},
    "max_tokens": 4,
}
COMPLETION = {"model": SERVED_MODEL, "prompt": [[49, 50, 51], [52]], "echo": True, "logprobs": 1, "max_tokens": 1}
RESPONSES = {
    "model": SERVED_MODEL,
    "input": [{"role": "user", "content": "1 + 1?"}],
    "instructions": "Be short.",
    "max_output_tokens": 4,
}
TOKENIZE = {"model": SERVED_MODEL, "messages": MESSAGES, "add_generation_prompt": True}
DETOKENIZE = {"model": SERVED_MODEL, "tokens": [49, 50, 51]}
ANTHROPIC = {
    "model": SERVED_MODEL,
    "system": "Be short.",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}],
    "max_tokens": 4,
    "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
}
SGLANG = {
    "rid": "a",
    "input_ids": [[50, 51], [52]],
    "sampling_params": {"max_new_tokens": 4, "n": 2, "top_k": 5, "stop": ["x"], "logit_bias": {"5": 1.0}},
    "return_logprob": True,
    "logprob_start_len": 0,
    "weight_version": {"min_version": 0, "exact_version": None},
}
TOKEN_IDS = {
    "token_ids": [50, 51],
    "sampling_params": {"max_tokens": 4, "n": 2, "logprobs": 1, "stop": ["x"]},
    "output_mode": "text",
}
OPENED = {
    "sample": {"task_name": "math", "messages": MESSAGES[1:2], "extra_env_info": {"ground_truth": "2"}},
    "sampling": {"temperature": 1.0, "max_new_tokens": 4},
    "limits": {"max_calls": 4},
    "deadline_s": 20.0,
    "priority": "train",
}
STREAM = ", streamed"
BODIES: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]] = {
    "chat/completions": [("", CHAT), (STREAM, CHAT), (", with tools", WITH_TOOLS), (", with a schema", WITH_SCHEMA)],
    "completions": [("", COMPLETION), (STREAM, COMPLETION)],
    "responses": [("", RESPONSES), (STREAM, RESPONSES)],
    "messages": [("", ANTHROPIC), (STREAM, ANTHROPIC)],
    "messages/count_tokens": [("", ANTHROPIC)],
    "tokenize": [("", TOKENIZE)],
    "detokenize": [("", DETOKENIZE)],
    "generate": [("", SGLANG), (STREAM, SGLANG)],
    "inference/v1/generate": [("", TOKEN_IDS)],
    "abort_request": [("", {"rid": "a", "abort_all": False})],
    "sessions": [("", OPENED)],
    "sessions/{session_id}/reward": [("", {"rewards": {"correct": 1.0, "form": 0.5}})],
    "sessions/{session_id}/v1/chat/completions": [("", CHAT)],
    "sessions/{session_id}/v1/messages": [(STREAM, ANTHROPIC)],
}
TARGETS = {
    f"JSON of POST /{path}{what}": as_json({**body, **({"stream": True} if what == STREAM else {})}, path)
    for path, bodies in BODIES.items()
    for what, body in bodies
}
