"""NeMo-Gym's own servers behind the harness, with a session that answers as it is told."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from examples.task_configs import python_of
from service.startup.config import free_port
from tests.clients.scripted_service import served
from tests.paths import REPOSITORY

NEMO_GYM = python_of("nemo_gym")
STARTED_WITHIN_S = 120.0
HARNESS = REPOSITORY / "examples" / "agents" / "nemo_gym_harness.py"
SERVERS = Path(__file__).parent / "nemo_gym_servers.py"
TOOLS: Any = [{"type": "function", "name": "increment_counter", "parameters": {"type": "object"}, "strict": True}]

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not NEMO_GYM.exists(), reason="NeMo-Gym needs Python 3.12 or newer: see make test-agents"),
]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the harness, in front of NeMo-Gym's servers of model, resources and agent."""
    log = tmp_path_factory.mktemp("nemo_gym") / "log"
    *ports, own = (str(free_port()) for _ in range(4))
    started: list[list[Any]] = [
        [NEMO_GYM, SERVERS, f"http://127.0.0.1:{own}/v1", *ports],
        [NEMO_GYM, HARNESS, "--agent", f"http://127.0.0.1:{ports[2]}", "--port", own],
    ]
    with log.open("w") as written:
        processes = [subprocess.Popen(command, stdout=written, stderr=written) for command in started]
    try:
        for port in (*ports, own):
            wait_for(f"http://127.0.0.1:{port}/", log)
        yield f"http://127.0.0.1:{own}"
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def wait_for(url: str, log: Path) -> None:
    given_up_at = time.monotonic() + STARTED_WITHIN_S
    while True:
        try:
            httpx.get(url, trust_env=False)
        except httpx.TransportError:
            assert time.monotonic() < given_up_at, log.read_text()[-4000:]
            time.sleep(0.2)
        else:
            return


class ScriptedSession:
    """The Responses API of a session: it counts 1, counts 2, and answers."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.keys: set[str] = set()
        self.app = FastAPI()
        self.app.post("/sessions/s1/v1/responses")(self.respond)

    async def respond(self, request: Request) -> Any:
        self.keys.add(request.headers["authorization"])
        self.asked.append(await request.json())
        count = len(self.asked)
        call = {"type": "function_call", "id": f"f{count}", "call_id": f"c{count}", "name": "increment_counter"}
        text = {"type": "output_text", "text": "6", "annotations": []}
        said = {"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": [text]}
        return {
            "id": f"resp_{count}",
            "object": "response",
            "created_at": 1,
            "model": "any",
            "output": [{**call, "arguments": json.dumps({"count": count})} if count < 3 else said],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }


@pytest.mark.parametrize(("expected_count", "reward"), [(6, 1.0), (7, 0.0)])
def test_the_agent_server_plays_a_row_through_the_session_of_its_rollout(
    harness: str, expected_count: int, reward: float
) -> None:
    session = ScriptedSession()
    asked = {"input": [{"role": "user", "content": "add 1 then add 2"}], "tools": TOOLS, "metadata": {"kept": "yes"}}
    row = {"responses_create_params": asked, "expected_count": expected_count, "initial_count": 3}
    with served(session.app) as url:
        rollout = {"base_url": f"{url}/sessions/s1", "api_key": "key", "sample": {"extra_env_info": row}}
        answer = httpx.post(f"{harness}/rollouts", json=rollout, timeout=120, trust_env=False)
    assert (answer.status_code, answer.json(), session.keys) == (200, reward, {"Bearer key"})
    assert [len(body["input"]) for body in session.asked] == [1, 3, 5]
    assert {json.dumps(body["metadata"]) for body in session.asked} == {'{"kept": "yes"}'}


def test_a_call_of_a_rollout_that_has_ended_is_refused(harness: str) -> None:
    body = {"input": "Q", "metadata": {"rollout_session": "gone"}}
    assert httpx.post(f"{harness}/v1/responses", json=body, trust_env=False).status_code == 410
