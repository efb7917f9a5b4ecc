"""The bridge to NeMo-Gym's resources servers, over a stand-in that keeps to the protocol of its source."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.tasks.bridges.nemo_gym import NeMoGymEnvironment, VerificationRefused
from rollout_env import ChatMessage, PlayResult, TemporaryFailure, check, play
from service.startup.config import free_port
from tests.paths import BRIDGED

SERVER = str(BRIDGED / "nemo_gym_server.py")
NO_FIELDS: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
TOOLS = [
    {"name": "increment_counter", "parameters": NO_FIELDS, "strict": True, "type": "function", "description": "Adds."},
    {"name": "get_counter_value", "parameters": NO_FIELDS, "strict": True, "type": "function", "description": "Reads."},
]

pytestmark = pytest.mark.slow


def row(text: str, expected: int, initial: int) -> dict[str, Any]:
    """As in the data of the example server."""
    asked = [{"role": "developer", "content": "Count."}, {"role": "user", "content": text}]
    return {
        "responses_create_params": {"input": asked, "tools": TOOLS},
        "expected_count": expected,
        "initial_count": initial,
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "example.jsonl"
    lines = [row("add 1 then add 2 then get the count", 6, 3), row("add 4", 10, 6), row("get", 2, 2)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    with subprocess.Popen([sys.executable, SERVER, str(port)]) as process:
        try:
            while process.poll() is None and not answers(f"http://127.0.0.1:{port}"):
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def answers(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.TransportError:
        return False
    return True


def made(url: str, rows: Path, **arguments: Any) -> NeMoGymEnvironment:
    checked: Any = url
    return NeMoGymEnvironment(checked, str(rows), **arguments)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(environment: NeMoGymEnvironment, *replies: Any, text: str = "add", **fields: Any) -> PlayResult:
    return play(environment, replies, {"extra_env_info": {**row(text, 6, 3), **fields}})


def test_calls_go_to_the_session_of_the_rollout_and_the_end_is_verified(url: str, rows: Path) -> None:
    environment = made(url, rows)
    for _ in range(2):
        result = played(
            environment,
            call("increment_counter", count=1) + call("increment_counter", count=2),
            call("get_counter_value"),
            "6.",
        )
        assert result.message_log[:2] == [{"role": "system", "content": "Count."}, {"role": "user", "content": "add"}]
        assert result.message_log[3:5] == [
            {
                "role": "tool",
                "content": '{"success":true}',
                "tool_call_id": f"call_1_{place}",
                "name": "increment_counter",
            }
            for place in range(2)
        ]
        assert result.message_log[6]["content"] == '{"count":6}'
        assert (result.total_reward, result.terminated, result.answers[-1]) == (1.0, True, "6.")
        assert result.message_log[-1]["role"] == "assistant", "no observation ends it"
    assert played(environment, "6, I guess.").total_reward == 0.0


def test_calls_that_the_service_has_parsed_keep_their_ids(url: str, rows: Path) -> None:
    calls = [{"id": "c7", "type": "function", "function": {"name": "increment_counter", "arguments": '{"count": 3}'}}]
    reply: ChatMessage = {
        "role": "assistant",
        "content": "...",
        "tool_calls": calls,
        "parsed_content": "I add.",
        "reasoning_content": "3 + 3",
    }
    result = played(made(url, rows), reply, "Done.")
    assert result.message_log[3]["tool_call_id"] == "c7"
    assert result.total_reward == 1.0


@pytest.mark.parametrize("name", ["verify", "seed_session", "../verify", "nothing"])
def test_only_the_tools_of_the_row_can_be_called(url: str, rows: Path, name: str) -> None:
    told = played(made(url, rows), call(name)).message_log[3]["content"]
    assert json.loads(told) == {"error": f"There is no tool {name}; there is get_counter_value, increment_counter."}


@pytest.mark.parametrize("name", ["verify", "seed_session", "aggregate_metrics", "../verify", "verify?x", "a/b", ""])
def test_a_sample_cannot_make_a_tool_of_another_route(url: str, rows: Path, name: str) -> None:
    asked = {"input": "Count.", "tools": [*TOOLS, {"type": "function", "name": name}]}
    record = {"id": "c1", "function": {"name": name, "arguments": "{}"}}
    reply: ChatMessage = {"role": "assistant", "content": "", "tool_calls": [record]}
    told = played(made(url, rows), reply, responses_create_params=asked).message_log[2]["content"]
    assert "There is no tool" in told or "must be a JSON object with a name" in told


def test_sessions_share_what_takes_long_to_make(url: str, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = made(url, rows)

    def given_alone(verify: Any, **_: Any) -> Any:
        assert verify is environment.ssl
        return verify

    monkeypatch.setattr("httpx._transports.default.create_ssl_context", given_alone)
    assert played(environment, call("increment_counter", count=3), "6").total_reward == 1.0


def test_a_server_on_this_machine_is_not_asked_through_a_proxy(
    url: str, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert played(made(url, rows), call("increment_counter", count=3), "6").total_reward == 1.0


def test_what_is_wrong_with_a_call_is_told(url: str, rows: Path) -> None:
    replies = [
        "<tool_call>{</tool_call>",
        call("increment_counter", count="many"),
        call("increment_counter", count=3),
        "6",
    ]
    result = played(made(url, rows), *replies)
    told = [message["content"] for message in result.message_log if message["role"] == "tool"]
    assert "Invalid tool call" in told[0]
    assert "unable to parse string as an integer" in told[1]
    assert result.total_reward == 1.0


def test_the_last_step_that_may_be_made_is_verified_with_its_calls(url: str, rows: Path) -> None:
    result = played(made(url, rows, max_steps=1), call("increment_counter", count=3), "late")
    assert (result.total_reward, result.terminated, result.unused_replies) == (1.0, True, ["late"])


def test_a_verification_that_is_refused_and_a_server_that_is_gone_fail_the_sample(url: str, rows: Path) -> None:
    with pytest.raises(VerificationRefused, match=r"/verify answered 422: .*expected_count"):
        played(made(url, rows), "6", expected_count="six")
    with pytest.raises(TemporaryFailure, match="does not answer"):
        played(made("http://127.0.0.1:9", rows), "6")


def test_rows_are_the_example_samples_and_have_the_tools(url: str, rows: Path, tmp_path: Path) -> None:
    environment = made(url, rows)
    assert [tool["function"]["name"] for tool in environment.tools] == ["increment_counter", "get_counter_value"]
    counts = [sample["extra_env_info"]["expected_count"] for sample in environment.example_samples(3, seed=1)]
    assert sorted(counts) == [2, 6, 10]
    wrong = tmp_path / "wrong.jsonl"
    for text, problem in (("", "has no rows"), ('{"input": 1}\n', "line 1: .*")):
        wrong.write_text(text)
        with pytest.raises(ValueError, match=problem):
            made(url, wrong)


def test_a_row_is_a_line_also_with_a_byte_order_mark_and_with_any_character_in_its_text(
    url: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    texts = ["add\u2028one", "add\x85two"]
    lines = [json.dumps(row(text, 1, 0), ensure_ascii=False) for text in texts]
    file.write_text("\n".join(lines), encoding="utf-8-sig")
    samples = made(url, file).example_samples(2, seed=1)
    asked = [sample["extra_env_info"]["responses_create_params"]["input"][-1]["content"] for sample in samples]
    assert sorted(asked) == sorted(texts)


def test_it_keeps_the_rules_for_environments(url: str, rows: Path) -> None:
    check(made(url, rows), replies=[call("increment_counter", count=1), "7"], samples=4, max_block_s=30)
