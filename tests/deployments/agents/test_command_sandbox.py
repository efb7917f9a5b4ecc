"""Commands in a sandbox: they reach the service, and nothing else. Skipped where bubblewrap does not work."""

import asyncio
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from deployments.agents.command_program import CommandProgram
from deployments.agents.programs import AgentCall, RunNotes
from deployments.agents.settings import CommandSettings
from deployments.failures import AgentFailed
from deployments.sandbox.providers.interface import ProviderUnusable
from tests.deployments.agents.test_harbor_program import works
from tests.deployments.models.chat_server import Answer, chat_server

pytestmark = pytest.mark.slow

ASKS = """
import json, os, pathlib, sys, urllib.request
sample = json.load(sys.stdin)
with urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models") as answer:
    assert answer.read().decode() == "models of " + os.environ["OPENAI_API_KEY"]
pathlib.Path(os.environ["ROLLOUT_REWARD_FILE"]).write_text(json.dumps({"idx": sample["idx"]}))
"""
REACHES_OUT = """
import os, pathlib, socket
for host, port in (("127.0.0.1", {port}), ("1.1.1.1", 80)):
    with socket.socket() as out:
        assert out.connect_ex((host, port)), f"{{host}} was reached"
assert not pathlib.Path({secret!r}).exists(), "a file of the service was seen"
assert len([name for name in os.listdir("/proc") if name.isdigit()]) < 8, "processes of the service were seen"
"""


needs_bubblewrap = pytest.mark.skipif(not works(), reason="bubblewrap does not work on this machine")


def rewarded(source: Callable[[int], str]) -> dict[str, float]:
    """What a sandboxed program comes to beside a service that answers everything with the same text."""

    with chat_server(lambda *_: Answer(body=b"models of key")) as server:
        argv = ["/usr/bin/python3", "-S", "-c", source(urlsplit(server.url).port or 0)]
        program = CommandProgram(CommandSettings(argv=argv, sandbox=True))
        call = AgentCall(base_url=f"{server.url}/sessions/s", api_key="key", sample={"idx": 4})
        reward = asyncio.run(program.run(call, RunNotes()))
    assert {request["path"] for request in server.requests} <= {"/v1/sessions/s/v1/models"}
    return reward


@needs_bubblewrap
def test_a_command_in_a_sandbox_reaches_its_session_and_gives_its_reward() -> None:
    assert rewarded(lambda _: ASKS) == {"idx": 4.0}


@needs_bubblewrap
def test_a_command_in_a_sandbox_reaches_nothing_else(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    assert rewarded(lambda port: REACHES_OUT.format(port=port, secret=str(secret))) == {}


@needs_bubblewrap
def test_a_reward_that_is_no_file_of_the_sandbox_fails_the_run() -> None:
    with pytest.raises(AgentFailed, match=r"The file reward\.json of the agent cannot be read: .* not a file"):
        rewarded(lambda _: "import os; os.mkdir(os.environ['ROLLOUT_REWARD_FILE'])")
    with pytest.raises(AgentFailed, match=r"The file reward\.json of the agent is not JSON"):
        rewarded(lambda _: "import os; open(os.environ['ROLLOUT_REWARD_FILE'], 'w').write('1' * 10**6 + ',')")


@needs_bubblewrap
def test_a_command_that_fails_in_a_sandbox_says_how() -> None:
    with pytest.raises(AgentFailed, match=r"ended with exit code 3. It wrote to stderr last: no tool$"):
        rewarded(lambda _: "import sys; print('no tool', file=sys.stderr); sys.exit(3)")


def test_without_bubblewrap_a_sandbox_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent / "nowhere"))
    assert shutil.which("bwrap") is None
    with pytest.raises(ProviderUnusable, match="needs bubblewrap"):
        CommandProgram(CommandSettings(argv=["true"], sandbox=True))
