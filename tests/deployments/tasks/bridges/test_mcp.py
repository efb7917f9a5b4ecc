"""The bridge to MCP servers, over a real server of the official package: on its standard input and output, and HTTP."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from deployments.tasks.bridges import mcp
from deployments.tasks.bridges.mcp import McpEnvironment, _McpServer
from rollout_env import PlayResult, TemporaryFailure, aplay, check, play
from service.startup.config import free_port
from tests.deployments.tasks.bridges.hosted_environments import wait_until_it_answers
from tests.deployments.tasks.bridges.mcp_server_by_hand import BROKEN, RESULTS
from tests.paths import BRIDGED

SERVER = str(BRIDGED / "mcp_server.py")
STDIO = _McpServer(command=sys.executable, args=[SERVER])
BY_HAND = str(Path(__file__).parent / "mcp_server_by_hand.py")
PROMPT = [{"role": "user", "content": "What is 40 + 2?"}]


@pytest.fixture(scope="module")
def http() -> Iterator[_McpServer]:
    port = free_port()
    with subprocess.Popen([sys.executable, SERVER, str(port)]) as process:
        server = _McpServer.model_validate({"url": f"http://127.0.0.1:{port}/mcp"})
        try:
            wait_until_it_answers(lambda: McpEnvironment(server), process)
            yield server
        finally:
            process.terminate()


@pytest.fixture(scope="module", params=["stdio", "http"])
def environment(request: pytest.FixtureRequest) -> McpEnvironment:
    server = STDIO if request.param == "stdio" else request.getfixturevalue("http")
    return McpEnvironment(server, call_timeout_s=120)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(environment: McpEnvironment, *replies: str, ground_truth: str = "42") -> PlayResult:
    return play(environment, replies, {"messages": PROMPT, "extra_env_info": {"ground_truth": ground_truth}})


def results(result: PlayResult) -> list[str]:
    return [message["content"] for message in result.message_log if message["role"] == "tool"]


def test_the_tools_of_the_server_are_those_of_the_chat_template(environment: McpEnvironment) -> None:
    functions = {tool["function"]["name"]: tool["function"] for tool in environment.tools}
    assert set(functions) == {"add", "count", "fail", "wait", "die"}
    assert functions["add"]["description"] == "Adds numbers."
    assert functions["add"]["parameters"]["properties"]["numbers"]["items"] == {"type": "number"}


def test_calls_are_answered_and_the_answer_is_judged(environment: McpEnvironment) -> None:
    result = played(environment, call("add", numbers=[40, 2]) + call("add", numbers=[1]), r"It is \boxed{42}.")
    assert result.message_log[2:4] == [
        {"role": "tool", "content": "42.0", "name": "add"},
        {"role": "tool", "content": "1.0", "name": "add"},
    ]
    assert (result.total_reward, result.terminated, result.answers[-1]) == (1.0, True, "42")
    assert result.message_log[-1]["role"] == "assistant", "no observation ends it"
    assert played(environment, "41").total_reward == 0.0


def test_what_is_wrong_with_a_call_is_told(environment: McpEnvironment) -> None:
    replies = [call("subtract"), "<tool_call>{</tool_call>", call("fail", reason="no luck"), call("add", numbers="x")]
    told = results(played(environment, *replies))
    assert told[0] == "Error: there is no tool subtract. There is add, count, die, fail, wait."
    assert told[1].startswith("Error: The call is not valid JSON")
    assert told[2] == "Error: Error executing tool fail"
    assert told[3].startswith("Error: ")


def test_a_call_that_takes_too_long_is_told_and_the_session_goes_on(environment: McpEnvironment) -> None:
    # On a busy machine a call that does not wait takes long too.
    for limit_s in (2, 8, 32):
        impatient = McpEnvironment(environment.server, call_timeout_s=limit_s)
        told = results(played(impatient, call("wait"), call("add", numbers=[1, 1])))
        assert told[0].startswith("Error: ")
        if not told[1].startswith("Error: "):
            break
    assert told[1] == "2.0"


def test_each_rollout_has_a_server_of_its_own_which_ends_with_it() -> None:
    environment = McpEnvironment(STDIO)
    for _ in range(2):
        assert results(played(environment, call("count"), call("count", step=5))) == ["1", "6"]
    assert [child for child in psutil.Process().children() if child.cmdline()[-1:] == [SERVER]] == []


@pytest.fixture
def uvloop_policy() -> Iterator[None]:
    """As in a replica of Ray Serve."""
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    yield
    asyncio.set_event_loop_policy(None)


def test_servers_are_started_beside_uvloop_without_a_fork(
    uvloop_policy: None,  # noqa: ARG001
) -> None:
    forks: list[int] = []
    os.register_at_fork(before=lambda: forks.append(1))
    environment = McpEnvironment(STDIO)

    async def story() -> list[str]:
        sample = {"messages": PROMPT, "extra_env_info": {}}
        return results(await aplay(environment, [call("count")], sample))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(story()) == ["1"]
    assert forks == []


def test_a_server_that_dies_is_a_temporary_failure() -> None:
    with pytest.raises(TemporaryFailure, match="The connection to the MCP server broke"):
        played(McpEnvironment(STDIO), call("die"))


@pytest.mark.parametrize(
    "server", [{"url": "http://127.0.0.1:9/mcp"}, {"command": "/no/such/program"}, {"command": "false"}]
)
def test_a_server_that_is_not_there_is_named(server: dict[str, Any]) -> None:
    with pytest.raises(TemporaryFailure, match="The MCP server cannot be reached"):
        McpEnvironment(_McpServer.model_validate(server), call_timeout_s=120)


def test_only_the_tools_of_the_config_can_be_called() -> None:
    environment = McpEnvironment(STDIO, tools=["add"])
    assert [tool["function"]["name"] for tool in environment.tools] == ["add"]
    assert results(played(environment, call("count"))) == ["Error: there is no tool count. There is add."]
    with pytest.raises(ValueError, match="the server has no tools subtract; it has add, count, fail, wait, die"):
        McpEnvironment(STDIO, tools=["subtract"])


def test_a_server_is_a_url_or_a_command() -> None:
    for wrong in ({}, {"url": "http://127.0.0.1:1/mcp", "command": "true"}):
        with pytest.raises(ValueError, match="give either a url or a command"):
            _McpServer.model_validate(wrong)


def test_it_keeps_the_rules_for_environments() -> None:
    check(McpEnvironment(STDIO), replies=[call("add", numbers=[1]), "42"], samples=2, max_block_s=30)


def by_hand(mode: str) -> _McpServer:
    return _McpServer(command=sys.executable, args=[BY_HAND, mode])


@pytest.fixture(scope="module")
def whole() -> McpEnvironment:
    return McpEnvironment(by_hand("whole"))


def test_tools_of_several_pages_are_all_known() -> None:
    paged, whole = McpEnvironment(by_hand("paged")), McpEnvironment(by_hand("whole"))
    assert len(paged.tools) == len(RESULTS) + len(BROKEN)
    assert paged.tools == whole.tools


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("same_cursor", "there are more than 1000"),
        ("late", "a page is refused: the second page is gone"),
        ("no_list", "a page is refused: The server's answer breaks MCP's schema: tools: Input should be a valid list."),
    ],
)
def test_a_list_of_tools_without_an_end_names_the_server(mode: str, reason: str) -> None:
    named = f"{sys.executable} {BY_HAND} {mode}"
    with pytest.raises(ValueError, match=re.escape(f"The MCP server {named} does not list its tools: {reason}.")):
        McpEnvironment(by_hand(mode))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", ["silent", "endless_pages"])
def test_a_server_that_never_lists_its_tools_is_named(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(mcp, "_OPEN_TIMEOUT_S", 5.0)
    message = f"The MCP server {sys.executable} {BY_HAND} {mode} listed no tools within 5 s."
    with pytest.raises(TemporaryFailure, match=rf"^{re.escape(message)}$"):
        McpEnvironment(by_hand(mode))


@pytest.mark.parametrize(
    ("tool", "shown"),
    [
        ("structured", '{"value": 42, "unit": "cm²"}'),
        ("structured_failure", 'Error: {"reason": "no luck"}'),
        ("text_and_structured", "42 cm"),
        ("resource", "42"),
        ("link", "(resource_link file:///a.txt)"),
        ("audio", "(audio audio/wav)\n42"),
        ("nothing", ""),
        ("blank_text", '(image image/png)\n{"value": 42}'),
        ("huge", "a" * 4_000_000),
    ],
)
def test_each_kind_of_content_is_shown_to_the_model(whole: McpEnvironment, tool: str, shown: str) -> None:
    assert results(played(whole, call(tool))) == [shown]


TOLD = {
    "no_content": "breaks MCP's schema: content: Field required.",
    "broken_failure": "breaks MCP's schema: content: Input should be a valid list.",
    "unknown_block": "breaks MCP's schema: content.0: this is no block of content that MCP knows.",
    "without_its_schema": "is not valid: Tool without_its_schema has an output schema but did not return",
    "against_its_schema": "is not valid: Invalid structured content returned by tool against_its_schema: '42' is not",
}


@pytest.mark.parametrize("tool", BROKEN)
def test_a_result_that_breaks_the_protocol_is_told_and_the_session_goes_on(whole: McpEnvironment, tool: str) -> None:
    result = played(whole, call(tool), call("text_and_structured"), "42")
    told, after = results(result)
    assert told.startswith(f"Error: The server's answer {TOLD.get(tool, '')}")
    assert len(told) < 510
    assert (after, result.total_reward) == ("42 cm", 1.0)


TALKS = f"import runpy; print('[INFO] listening', flush=True); runpy.run_path({SERVER!r}, run_name='__main__')"


def test_lines_that_a_server_logs_on_its_output_make_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    environment = McpEnvironment(_McpServer(command=sys.executable, args=["-c", TALKS]))
    assert played(environment, "42").rewards == {"reward": 1.0}
    noise = [record for record in caplog.records if record.exc_info and "JSONRPC" in str(record.exc_info[1])]
    assert noise == []
