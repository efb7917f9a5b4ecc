"""Answers of the model server's API beside those of vLLM's own server: the same requests, greedy, field by field."""

import json
import os
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import pytest

from benchmarks.process_group import started
from examples.task_configs import config_for
from service.startup.config import free_port
from tests.live.services import CONFIG
from tests.paths import SMALL_MODEL

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
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


@dataclass(frozen=True)
class Servers:
    ours: httpx.Client
    theirs: httpx.Client

    def answers(self, path: str, body: dict[str, Any]) -> tuple[httpx.Response, httpx.Response]:
        return self.ours.post(path, json=body), self.theirs.post(THEIR_PATHS.get(path, path), json=body)


@pytest.fixture(scope="module")
def servers(small_url: str) -> Iterator[Servers]:
    """The service, and vLLM's server with the engine's settings and the parsers of the service."""
    [application] = config_for(CONFIG, SMALL_MODEL, ("math",)).applications
    engine, responses = application.args["engine"], application.args["responses"]
    port = free_port()
    their_url = f"http://127.0.0.1:{port}"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(SMALL_MODEL), "--served-model-name", SMALL_MODEL.name),
        *("--dtype", engine["dtype"], "--max-model-len", str(engine["max_model_len"])),
        *("--max-num-batched-tokens", str(engine["max_num_batched_tokens"]), "--no-enable-chunked-prefill"),
        *("--enforce-eager", "--logprobs-mode", "processed_logprobs"),
        *("--enable-auto-tool-choice", "--tool-call-parser", responses["tool_call_parser"]),
        *("--reasoning-parser", responses["reasoning_parser"]),
    ]
    with (
        started(command, f"{their_url}/health", os.environ | engine["environment_variables"]),
        httpx.Client(base_url=their_url, timeout=120) as theirs,
        httpx.Client(base_url=small_url, timeout=120) as ours,
    ):
        yield Servers(ours, theirs)


def without(names: Set[str], value: Any) -> Any:
    """Without the fields of these names; log-probabilities as far as two runs of an engine agree."""
    match value:
        case dict():
            return {name: without(names, one) for name, one in value.items() if name not in names}
        case list():
            return [without(names, one) for one in value]
        case float() if names >= ADDED:
            return pytest.approx(value, abs=2e-3)
    return value


comparable, without_ids = partial(without, DIFFERENT | ADDED), partial(without, DIFFERENT)
"""Of the service's answers, and of vLLM's."""


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


CHAT = "/v1/chat/completions"
STREAM_OPTIONS = {CHAT: {"stream_options": {"include_usage": True}}}


def asked(**given: Any) -> dict[str, Any]:
    return {"messages": [QUESTION], "temperature": 0, "max_tokens": 96, **given}


CHATS = {
    "plain": asked(),
    "several messages": asked(messages=[{"role": "system", "content": "Be brief."}, QUESTION]),
    "tools": asked(tools=[TOOL]),
    "a tool that must be called": asked(tools=[TOOL], tool_choice=CALLS_IT),
    "a JSON schema": asked(response_format=FORM),
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


RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "messages": {"input": [QUESTION, {"role": "assistant", "content": "5"}, QUESTION]},
    "tools": {"tools": [{"type": "function", **CALCULATOR}]},
    "a JSON schema": {"text": {"format": FORM["json_schema"] | {"type": "json_schema"}}},
    "instructions": {"instructions": "Be brief."},
}
MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a system prompt": {"system": "Be brief."},
    "tools": {"tools": [{"name": "calculator", "description": "Computes.", "input_schema": CALCULATOR["parameters"]}]},
    "a stop sequence": {"stop_sequences": ["5"]},
    "few tokens": {"max_tokens": 3},
}
IDS = [87, 104, 97, 116]
COMPLETIONS: dict[str, dict[str, Any]] = {
    "a text": {"prompt": "What is 2 + 3?"},
    "a prompt's log-probabilities": {"prompt": [IDS, IDS[:2], IDS[:1]], "logprobs": 1, "echo": True, "max_tokens": 1},
    "stop strings": {"prompt": "What is 2 + 3?", "stop": ["5"], "return_token_ids": True},
    "several texts": {"prompt": ["What is 2 + 3?", "What is"], "n": 2},
    "ids, with log-probabilities": {"prompt": IDS, "logprobs": 3},
    "nothing but the prompt": {"prompt": ["What is 2 + 3?"], "logprobs": 1, "echo": True, "max_tokens": 0},
    "no prompt": {"prompt": []},
}
NOT_STREAMED = ("several texts", "ids, with log-probabilities", "nothing but the prompt", "no prompt")
COUNTED: dict[str, Any] = {"model": str(SMALL_MODEL), "messages": [QUESTION], "temperature": 0, "max_tokens": 96}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"chat: {name}": (CHAT, body) for name, body in CHATS.items()},
    **{
        f"response: {name}": (
            "/v1/responses",
            {"input": QUESTION["content"], "temperature": 0, "max_output_tokens": 96, **body},
        )
        for name, body in RESPONSES.items()
    },
    **{f"message: {name}": ("/v1/messages", COUNTED | body) for name, body in MESSAGES.items()},
    **{
        f"completion: {name}": ("/v1/completions", {"temperature": 0, "max_tokens": 32, **body})
        for name, body in COMPLETIONS.items()
    },
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ids of a text": ("/v1/tokenize", {"prompt": "What is 2 + 3?", "return_token_strs": True}),
    "ids of messages": ("/v1/tokenize", {"messages": [QUESTION], "tools": [TOOL]}),
    "text of ids": ("/v1/detokenize", {"tokens": IDS}),
    "a count": ("/v1/messages/count_tokens", COUNTED),
    "an unknown model": (CHAT, asked(model="gpt-4o")),
    "no tokens": (CHAT, asked(max_tokens=-1)),
    "no messages": (CHAT, {"temperature": 0}),
    "too long": (CHAT, asked(messages=[{**QUESTION, "content": "a" * 20_000}])),
}
THEIR_PATHS = {"/v1/tokenize": "/tokenize", "/v1/detokenize": "/detokenize"}


@pytest.mark.parametrize(("path", "body"), (CALLS | OTHERS).values(), ids=CALLS | OTHERS)
def test_a_call_is_answered_alike(servers: Servers, path: str, body: dict[str, Any]) -> None:
    mine, other = servers.answers(path, body)
    assert (mine.status_code, mine.headers["content-type"]) == (other.status_code, other.headers["content-type"])
    assert comparable(mine.json()) == without_ids(other.json())


STREAMED = {name: call for name, call in CALLS.items() if name.removeprefix("completion: ") not in NOT_STREAMED}


@pytest.mark.parametrize(("path", "body"), STREAMED.values(), ids=STREAMED)
def test_a_call_is_streamed_alike(servers: Servers, path: str, body: dict[str, Any]) -> None:
    answers = servers.answers(path, body | {"stream": True, **STREAM_OPTIONS.get(path, {})})
    mine, reference = map(events_of, answers)
    match path:
        case "/v1/completions":
            assert written(comparable(mine)) == written(reference)
        case "/v1/chat/completions":
            assert joined(comparable(mine)) == joined(reference)
            assert fields_of(mine) == fields_of(reference)
        case "/v1/responses":
            assert kinds_of(mine) == kinds_of(reference)
            assert comparable(mine[-1]["response"]) == without_ids(reference[-1]["response"])
        case _:
            assert kinds_of(mine) == kinds_of(reference)
            assert told(mine) == told(reference)


def test_a_schema_that_no_grammar_knows_is_refused_alike(servers: Servers) -> None:
    """With another sentence: the service compiles with one backend, vLLM tries a second."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
    mine, other = (answer.json()["error"] for answer in servers.answers(CHAT, asked(response_format=schema)))
    assert (mine["type"], mine["code"]) == (other["type"], other["code"]) == ("BadRequestError", 400)
    assert "it cannot be compiled: " in mine["message"]


def test_the_models_are_listed_alike(servers: Servers) -> None:
    [card] = servers.theirs.get("/v1/models").json()["data"]
    # The service does not say in which folder the model lies.
    listed = {"object": "list", "data": [card | {"root": SMALL_MODEL.name}]}
    assert comparable(servers.ours.get("/v1/models").json()) == without_ids(listed)


def fields_of(events: list[Any]) -> set[str]:
    return {name for event in events for name in event} | {
        f"{name} of a choice" for event in events for choice in event["choices"] for name in choice.keys() - ADDED
    }


def kinds_of(events: list[Any]) -> list[str]:
    """Those of the events; one for all deltas in a row."""
    kinds = [event["type"] for event in events]
    return [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]


def told(events: list[Any]) -> dict[str, str]:
    """The texts of all blocks, by the kind of their deltas."""
    texts: dict[str, str] = {}
    for delta in (event["delta"] for event in events if event["type"] == "content_block_delta"):
        [text] = [value for name, value in delta.items() if name not in ("type", "signature")] or [""]
        texts[delta["type"]] = texts.get(delta["type"], "") + text
    return texts


def written(events: list[Any]) -> dict[int, tuple[str, str, list[Any]]]:
    """The text of each choice, why it ends, and its log-probabilities."""
    choices: dict[int, tuple[str, str, list[Any]]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text, end, logprobs = choices.get(choice["index"], ("", "", []))
        more = (choice.get("logprobs") or {}).get("token_logprobs") or []
        choices[choice["index"]] = (text + choice["text"], choice["finish_reason"] or end, [*logprobs, *more])
    return choices
