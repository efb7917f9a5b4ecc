"""Answers of the model server's API beside those of vLLM's own server: the same requests, greedy, field by field."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from examples.task_configs import config_for
from service.startup.config import free_port
from service.startup.local_service import local_service
from tests.paths import REPOSITORY, SMALL_MODEL

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
START_S = 400
QUESTION: Any = {"role": "user", "content": "What is 2 + 3?"}
CALCULATOR: Any = {
    "name": "calculator",
    "description": "Computes an expression.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}
TOOL: Any = {"type": "function", "function": CALCULATOR}
CALLS_IT: Any = {"type": "function", "function": {"name": "calculator"}}
SCHEMA: Any = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
DIFFERENT = frozenset(
    {
        *("id", "created", "created_at", "completed_at", "request_id", "item_id", "call_id", "permission"),
        *("tool_use_id", "signature", "system_fingerprint"),
    }
)
"""Fields that hold ids and times. vLLM signs thoughts with a random id; a fingerprint is that of a configuration."""
ADDED = frozenset({"weight_versions"})
"""Fields that only the service's answers have."""


@pytest.fixture(scope="module")
def ours() -> Iterator[httpx.Client]:
    config = config_for(REPOSITORY / "serve_config.cpu.yaml", SMALL_MODEL, ("math",))
    with local_service(config, Console(stderr=True)) as url, httpx.Client(base_url=url, timeout=120) as service:
        yield service


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """vLLM's server with the engine's settings and the parsers of the service."""
    [application] = config_for(REPOSITORY / "serve_config.cpu.yaml", SMALL_MODEL, ("math",)).applications
    engine, responses = application.args["engine"], application.args["responses"]
    port, log = free_port(), tmp_path_factory.mktemp("vllm") / "log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *(
            "--model",
            str(SMALL_MODEL),
            "--served-model-name",
            SMALL_MODEL.name,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ),
        *("--dtype", engine["dtype"], "--max-model-len", str(engine["max_model_len"])),
        *("--max-num-batched-tokens", str(engine["max_num_batched_tokens"]), "--no-enable-chunked-prefill"),
        *("--enforce-eager", "--logprobs-mode", "processed_logprobs"),
        *("--enable-auto-tool-choice", "--tool-call-parser", responses["tool_call_parser"]),
        *("--reasoning-parser", responses["reasoning_parser"]),
    ]
    with (
        log.open("w") as output,
        started(command, os.environ | engine["environment_variables"], output) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
    ):
        wait_until_ready(client, server, log)
        yield client


@contextmanager
def started(command: list[str], environment: dict[str, str], output: Any) -> "Iterator[subprocess.Popen[bytes]]":
    """For the length of the block the program runs."""
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(client: httpx.Client, server: "subprocess.Popen[bytes]", log: Path) -> None:
    given_up_at = time.monotonic() + START_S
    while True:
        assert server.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < given_up_at, log.read_text()[-3000:]
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)


def comparable(value: Any) -> Any:
    """Without ids, times, and what only one side has; log-probabilities as far as two runs of an engine agree."""
    match value:
        case dict():
            return {name: comparable(one) for name, one in value.items() if name not in DIFFERENT | ADDED}
        case list():
            return [comparable(one) for one in value]
        case float():
            return pytest.approx(value, abs=2e-3)
    return value


def events_of(answer: httpx.Response) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def joined(events: list[Any]) -> dict[str, Any]:
    """The chunks of a chat as one answer: an engine that is slower sends more and shorter ones."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        whole = choices.setdefault(choice["index"], {"texts": {}, "calls": {}, "logprobs": [], "ends": {}})
        for name, text in choice["delta"].items():
            if name != "tool_calls":
                whole["texts"][name] = (whole["texts"].get(name) or "") + (text or "")
        for call in choice["delta"].get("tool_calls") or ():
            function = whole["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
            for name in function:
                function[name] += call["function"].get(name) or ""
        whole["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
        if choice["finish_reason"] is not None:
            whole["ends"] = {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
    usage = [event["usage"] for event in events if event.get("usage")]
    return {"choices": choices, "usage": usage[-1:], "model": {event["model"] for event in events}}


def asked(**given: Any) -> dict[str, Any]:
    return {"messages": [QUESTION], "temperature": 0, "max_tokens": 96, **given}


CHATS = {
    "plain": asked(),
    "several messages": asked(messages=[{"role": "system", "content": "Be brief."}, QUESTION]),
    "tools": asked(tools=[TOOL]),
    "a tool that must be called": asked(
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "calculator"}}
    ),
    "a JSON schema": asked(
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    ),
    "a JSON object": asked(response_format={"type": "json_object"}, chat_template_kwargs={"enable_thinking": False}),
    "log-probabilities": asked(logprobs=True, top_logprobs=3),
    "choices": asked(n=3),
    "a stop string": asked(stop=["5"]),
    "a stop string that is shown": asked(stop=["5"], include_stop_str_in_output=True),
    "few tokens": asked(max_tokens=3),
    "penalties": asked(presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.1),
    "token ids": asked(return_token_ids=True),
    "no thoughts": asked(chat_template_kwargs={"enable_thinking": False}),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_answered_alike(ours: httpx.Client, theirs: httpx.Client, name: str) -> None:
    assert_alike(ours, theirs, "/v1/chat/completions", CHATS[name])


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_streamed_alike(ours: httpx.Client, theirs: httpx.Client, name: str) -> None:
    body = {**CHATS[name], "stream": True, "stream_options": {"include_usage": True}}
    mine, reference = (events_of(server.post("/v1/chat/completions", json=body)) for server in (ours, theirs))
    assert joined(comparable(mine)) == joined(reference)
    assert fields_of(mine) == fields_of(reference)


def fields_of(events: list[Any]) -> set[str]:
    return {name for event in events for name in event} | {
        f"{name} of a choice" for event in events for choice in event["choices"] for name in choice.keys() - ADDED
    }


RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "messages": {"input": [QUESTION, {"role": "assistant", "content": "5"}, QUESTION]},
    "tools": {"tools": [{"type": "function", **CALCULATOR}]},
    "a JSON schema": {"text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}},
    "instructions": {"instructions": "Be brief."},
}


def asked_of_responses(name: str) -> dict[str, Any]:
    return {"input": QUESTION["content"], "temperature": 0, "max_output_tokens": 96, **RESPONSES[name]}


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_is_alike(ours: httpx.Client, theirs: httpx.Client, name: str) -> None:
    assert_alike(ours, theirs, "/v1/responses", asked_of_responses(name))


@pytest.mark.parametrize("name", RESPONSES)
def test_the_events_of_a_response_are_alike(ours: httpx.Client, theirs: httpx.Client, name: str) -> None:
    body = {**asked_of_responses(name), "stream": True}
    mine, reference = (events_of(server.post("/v1/responses", json=body)) for server in (ours, theirs))
    assert kinds_of(mine) == kinds_of(reference)
    assert comparable(mine[-1]["response"]) == without_ids(reference[-1]["response"])


def kinds_of(events: list[Any]) -> list[str]:
    """Those of the events; one for all deltas in a row."""
    kinds = [event["type"] for event in events]
    return [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]


MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a system prompt": {"system": "Be brief."},
    "tools": {"tools": [{"name": "calculator", "description": "Computes.", "input_schema": CALCULATOR["parameters"]}]},
    "a stop sequence": {"stop_sequences": ["5"]},
    "few tokens": {"max_tokens": 3},
}


def asked_of_messages(name: str) -> dict[str, Any]:
    return {"model": str(SMALL_MODEL), "messages": [QUESTION], "temperature": 0, "max_tokens": 96, **MESSAGES[name]}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_answered_alike(ours: httpx.Client, theirs: httpx.Client, name: str) -> None:
    assert_alike(ours, theirs, "/v1/messages", asked_of_messages(name))


@pytest.mark.parametrize("name", MESSAGES)
def test_the_events_of_a_message_are_alike(ours: httpx.Client, theirs: httpx.Client, name: str) -> None:
    body = {**asked_of_messages(name), "stream": True}
    mine, reference = (events_of(server.post("/v1/messages", json=body)) for server in (ours, theirs))
    assert kinds_of(mine) == kinds_of(reference)
    assert told(mine) == told(reference)


def told(events: list[Any]) -> dict[str, str]:
    """The texts of all blocks, by the kind of their deltas."""
    texts: dict[str, str] = {}
    for delta in (event["delta"] for event in events if event["type"] == "content_block_delta"):
        [text] = [value for name, value in delta.items() if name not in ("type", "signature")] or [""]
        texts[delta["type"]] = texts.get(delta["type"], "") + text
    return texts


IDS = [87, 104, 97, 116]
COMPLETIONS: dict[str, dict[str, Any]] = {
    "a text": {"prompt": "What is 2 + 3?"},
    "several texts": {"prompt": ["What is 2 + 3?", "What is"], "n": 2},
    "ids, with log-probabilities": {"prompt": IDS, "logprobs": 3},
    "a prompt's log-probabilities": {"prompt": [IDS, IDS[:2], IDS[:1]], "logprobs": 1, "echo": True, "max_tokens": 1},
    "nothing but the prompt": {"prompt": ["What is 2 + 3?"], "logprobs": 1, "echo": True, "max_tokens": 0},
    "stop strings": {"prompt": "What is 2 + 3?", "stop": ["5"], "return_token_ids": True},
    "no prompt": {"prompt": []},
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_text_is_completed_alike(ours: httpx.Client, theirs: httpx.Client, name: str) -> None:
    assert_alike(ours, theirs, "/v1/completions", {"temperature": 0, "max_tokens": 32, **COMPLETIONS[name]})


@pytest.mark.parametrize("name", ["a text", "a prompt's log-probabilities", "stop strings"])
def test_a_completed_text_is_streamed_alike(ours: httpx.Client, theirs: httpx.Client, name: str) -> None:
    body = {"temperature": 0, "max_tokens": 32, **COMPLETIONS[name], "stream": True}
    mine, reference = (events_of(server.post("/v1/completions", json=body)) for server in (ours, theirs))
    assert written(comparable(mine)) == written(reference)


def written(events: list[Any]) -> dict[int, tuple[str, str, list[Any]]]:
    """The text of each choice, why it ends, and its log-probabilities."""
    choices: dict[int, tuple[str, str, list[Any]]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text, end, logprobs = choices.get(choice["index"], ("", "", []))
        more = (choice.get("logprobs") or {}).get("token_logprobs") or []
        choices[choice["index"]] = (text + choice["text"], choice["finish_reason"] or end, [*logprobs, *more])
    return choices


OTHERS: dict[str, tuple[str, str, Any]] = {
    "ids of a text": ("/v1/tokenize", "/tokenize", {"prompt": "What is 2 + 3?", "return_token_strs": True}),
    "ids of messages": ("/v1/tokenize", "/tokenize", {"messages": [QUESTION], "tools": [TOOL]}),
    "text of ids": ("/v1/detokenize", "/detokenize", {"tokens": [87, 104, 97, 116]}),
    "a count": ("/v1/messages/count_tokens", "/v1/messages/count_tokens", asked_of_messages("plain")),
    "an unknown model": ("/v1/chat/completions", "/v1/chat/completions", asked(model="gpt-4o")),
    "no tokens": ("/v1/chat/completions", "/v1/chat/completions", asked(max_tokens=-1)),
    "no messages": ("/v1/chat/completions", "/v1/chat/completions", {"temperature": 0}),
    "too long": (
        "/v1/chat/completions",
        "/v1/chat/completions",
        asked(messages=[{**QUESTION, "content": "a" * 20_000}]),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_answered_alike(ours: httpx.Client, theirs: httpx.Client, name: str) -> None:
    path, reference, body = OTHERS[name]
    assert_alike(ours, theirs, path, body, reference)


def test_a_schema_that_no_grammar_knows_is_refused_alike(ours: httpx.Client, theirs: httpx.Client) -> None:
    """With another sentence: the service compiles with one backend, vLLM tries a second."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
    mine, other = (
        one.post("/v1/chat/completions", json=asked(response_format=schema)).json()["error"] for one in (ours, theirs)
    )
    assert (mine["type"], mine["code"]) == (other["type"], other["code"]) == ("BadRequestError", 400)
    assert "it cannot be compiled: " in mine["message"]


def test_the_models_are_listed_alike(ours: httpx.Client, theirs: httpx.Client) -> None:
    [card] = theirs.get("/v1/models").json()["data"]
    # The service does not say in which folder the model lies.
    listed = {"object": "list", "data": [card | {"root": SMALL_MODEL.name}]}
    assert comparable(ours.get("/v1/models").json()) == without_ids(listed)


def assert_alike(
    ours: httpx.Client, theirs: httpx.Client, path: str, body: dict[str, Any], reference: str | None = None
) -> None:
    mine, other = ours.post(path, json=body), theirs.post(reference or path, json=body)
    assert (mine.status_code, mine.headers["content-type"]) == (other.status_code, other.headers["content-type"])
    assert comparable(mine.json()) == without_ids(other.json())


def without_ids(value: Any) -> Any:
    match value:
        case dict():
            return {name: without_ids(one) for name, one in value.items() if name not in DIFFERENT}
        case list():
            return [without_ids(one) for one in value]
    return value
