"""Harnesses that work in the sandboxes of their runs over HTTP, under bubblewrap."""

import json
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from tests.deployments.agents.test_harbor_program import played, sample, task_with, works

pytestmark = pytest.mark.skipif(not works(), reason="bubblewrap does not work on this machine")
# It takes so long that a harness can call again while it runs.
TEST = "sleep 1; cat /root/left > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"


def played_by(work: Callable[[dict[str, Any]], None], folder: Path, toml: str = "") -> tuple[dict[str, float], Any]:
    """Reward and metrics of a run of a harness that does the work, and answers with a reward of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            work(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            with suppress(BrokenPipeError):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"1.0")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    agent: dict[str, Any] = {"command": None, "harness": {"url": f"http://127.0.0.1:{server.server_port}/"}}
    try:
        return played(sample() | {"task_name": "t"}, harbor={"tasks": task_with(folder, TEST, toml)}, **agent)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def post(sandbox: str, script: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{sandbox}/exec", json={"argv": ["sh", "-c", script], **fields}, timeout=60)


def test_a_harness_works_in_the_sandbox_and_the_verifier_says_the_reward(tmp_path: Path) -> None:
    seen: list[Any] = []

    def work(call: dict[str, Any]) -> None:
        done = post(call["sandbox"], "cat $OF > left; pwd", environment={"OF": "-"}, cwd="/root", stdin="0.5")
        seen.append((call["api_key"], call["sample"]["extra_env_info"]["task"], done.json()))

    reward, metrics = played_by(work, tmp_path)
    assert seen == [("key", "t", {"exit_code": 0, "stdout": "/root\n", "stderr": ""})]
    assert (reward, "agent_failed" in metrics) == ({"reward": 0.5}, False)


def test_a_command_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    answers: list[httpx.Response] = []

    def work(call: dict[str, Any]) -> None:
        url = call["sandbox"]
        answers.extend([post(url, "", argv=[]), post(url, "", user="root"), post(url, "sleep 60", timeout_s=0.2)])
        answers.append(post(f"{url}-", "echo 1 > /root/left"))

    assert played_by(work, tmp_path)[0] == {"reward": 0.0}
    assert [answer.status_code for answer in answers] == [422, 422, 408, 410]
    assert ("argv" in answers[0].text, "user" in answers[1].text) == (True, True)


def test_a_command_ends_with_its_run_and_none_is_taken_after_it(tmp_path: Path) -> None:
    answers: list[int] = []

    def work(call: dict[str, Any]) -> None:
        for script in ("sleep 60; echo 1 > /root/left", "echo 1 > /root/left"):
            answers.append(post(call["sandbox"], script).status_code)

    reward, metrics = played_by(work, tmp_path, "[agent]\ntimeout_sec = 1.0")
    assert (reward, metrics["agent_timed_out"], answers) == ({"reward": 0.0}, 1.0, [410, 410])
