"""The remote sandbox against its server, started for real in a process of its own."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from deployments.environments.code import CodeEnvironment, SandboxSettings
from deployments.sandbox import Limits, Program, ProgramRefused, SandboxLost
from deployments.sandbox.remote import TOKEN_VARIABLE, RemoteSandbox
from rollout_env import play
from service.startup.ports import free_port
from tests.deployments.sandbox.test_local import ends_when_nobody_waits
from tests.virtual_time import runs

pytestmark = pytest.mark.slow

TOKEN = "of-the-test"
LIMITS = Limits()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "deployments.sandbox.server", "--port", str(port)],
        env={**os.environ, "ROLLOUT_SANDBOX_TOKEN": TOKEN},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    while server.poll() is None:
        try:
            httpx.get(url)
            break
        except httpx.TransportError:
            time.sleep(0.05)
    yield url
    server.terminate()
    server.wait()


def test_a_run_is_answered_as_by_a_local_sandbox(url: str) -> None:
    sandbox = RemoteSandbox(url, TOKEN)
    program = Program("import sys\nprint(input(), sys.argv[1], open('a/b').read())", "in", ("x",))
    outcome = asyncio.run(sandbox.run(program, {"a/b": b"file"}, LIMITS))
    assert (outcome.ended_by, outcome.exit_code, outcome.stdout) == ("exit", 0, "in x file\n")


def test_the_task_code_uses_the_server_that_its_settings_name(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    environment = CodeEnvironment(sandbox=SandboxSettings(url=url))
    assert isinstance(environment.sandbox, RemoteSandbox)
    sample = {
        "messages": [{"role": "user", "content": "?"}],
        "extra_env_info": {"tests": [{"call": "f(2)", "expected": 4}]},
    }
    assert play(environment, ["```python\ndef f(x): return 2 * x\n```"], sample).total_reward == 1.0


def test_its_limits_hold(url: str) -> None:
    outcome = asyncio.run(RemoteSandbox(url, TOKEN).run(Program("import time; time.sleep(99)"), {}, Limits(time_s=0.3)))
    assert (outcome.ended_by, outcome.exit_code) == ("time", None)


def test_what_a_local_sandbox_refuses_it_refuses(url: str) -> None:
    with pytest.raises(ProgramRefused, match=r"files: '\.\./x' must be a relative path without '\.\.'\."):
        asyncio.run(RemoteSandbox(url, TOKEN).run(Program(""), {"../x": b""}, LIMITS))


@runs
async def test_a_run_that_nobody_waits_for_is_ended_at_the_server(url: str) -> None:
    await ends_when_nobody_waits(RemoteSandbox(url, TOKEN))


def test_without_the_token_nothing_is_run(url: str) -> None:
    with pytest.raises(SandboxLost, match=r"answered 401: The token is missing or wrong\."):
        asyncio.run(RemoteSandbox(url, "another").run(Program("print(1)"), {}, LIMITS))


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"program": {"source": 1}}', '{"program": {"source": "", "x": 1}}'])
def test_a_body_that_is_no_program_is_refused(url: str, body: str) -> None:
    answer = httpx.post(f"{url}/run", content=body, headers={"Authorization": f"Bearer {TOKEN}"})
    assert (answer.status_code, answer.text.startswith("The body is not a program: ")) == (422, True)


def test_a_server_that_is_not_there_is_a_lost_sandbox() -> None:
    with pytest.raises(SandboxLost, match=r"The sandbox's server did not answer: ConnectError"):
        asyncio.run(RemoteSandbox(f"http://127.0.0.1:{free_port()}").run(Program(""), {}, LIMITS))


def test_without_a_token_the_server_listens_on_loopback_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deployments.sandbox.server", "--host", "0.0.0.0"],
        env={name: value for name, value in os.environ.items() if name != "ROLLOUT_SANDBOX_TOKEN"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "needs a token in" in done.stderr
