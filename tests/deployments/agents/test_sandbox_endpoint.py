"""Harnesses that work in the sandboxes of their runs over HTTP, under bubblewrap."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from deployments.failures import EnvironmentLost
from tests.deployments.agents.test_harbor_program import played, sample, task_with, works

pytestmark = pytest.mark.skipif(not works(), reason="bubblewrap does not work on this machine")
CLIENT = httpx.Client(timeout=60)
JUDGED_SLOWLY = "sleep 1; "
"""A verifier that takes so long is still running when the harness calls again."""
JUDGED_BY_WHAT_IS_LEFT = "cat /root/left > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"


@contextmanager
def harness(work: Callable[[dict[str, Any]], None], status: int = 200) -> Iterator[str]:
    """Yields the URL of a harness that does the work of each call, and answers with a reward of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            work(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            with suppress(BrokenPipeError):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"1.0")

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def played_by(
    work: Callable[[dict[str, Any]], None], folder: Path, toml: str = "", first: str = "", status: int = 200
) -> tuple[dict[str, float], dict[str, float]]:
    tasks = task_with(folder, first + JUDGED_BY_WHAT_IS_LEFT, toml)
    with harness(work, status) as url:
        return played(sample() | {"task_name": "tasks"}, harbor={"tasks": tasks}, command=None, harness={"url": url})


def test_a_harness_works_in_the_sandbox_and_the_verifier_says_the_reward(tmp_path: Path) -> None:
    seen: list[Any] = []

    def work(call: dict[str, Any]) -> None:
        sandbox = call["sandbox"]
        program = {"path": "/root/half", "executable": "true"}
        CLIENT.put(f"{sandbox}/files", params=program, content=b"#!/bin/sh\ncat $OF\n").raise_for_status()
        command = {"argv": ["sh", "-c", "/root/half - > left && pwd"], "environment": {"OF": "-"}, "stdin": "0.5"}
        done = CLIENT.post(f"{sandbox}/exec", json=command | {"cwd": "/root", "timeout_s": 20}).json()
        left = CLIENT.get(f"{sandbox}/files", params={"path": "/root/left"})
        seen.append((call["api_key"], call["sample"]["extra_env_info"]["task"], done, left.content))

    reward, metrics = played_by(work, tmp_path)
    assert seen == [("key", "t", {"exit_code": 0, "stdout": "/root\n", "stderr": ""}, b"0.5")]
    assert reward == {"reward": 0.5}
    assert "agent_failed" not in metrics


def test_a_call_that_makes_no_sense_is_refused_by_its_field(tmp_path: Path) -> None:
    answers: list[tuple[int, str]] = []

    def work(call: dict[str, Any]) -> None:
        url = call["sandbox"]
        for answer in (
            CLIENT.post(f"{url}/exec", json={"argv": []}),
            CLIENT.post(f"{url}/exec", json={"argv": ["true"], "user": "root"}),
            CLIENT.post(f"{url}/exec", json={"argv": ["sleep", "60"], "timeout_s": 0.2}),
            CLIENT.get(f"{url}/files"),
            CLIENT.put(f"{url}/files", params={"path": "left"}),
            CLIENT.get(f"{url}/files", params={"path": "/root/left"}),
            CLIENT.get(f"{url[:-1]}/files", params={"path": "/root/left"}),
        ):
            answers.append((answer.status_code, answer.text))

    assert played_by(work, tmp_path)[0] == {"reward": 0.0}
    assert [status for status, _ in answers] == [422, 422, 408, 422, 422, 404, 410]
    assert ("argv" in answers[0][1], "user" in answers[1][1]) == (True, True)


def test_a_call_ends_with_its_run_and_none_is_taken_after_it(tmp_path: Path) -> None:
    answers: list[int] = []

    def work(call: dict[str, Any]) -> None:
        for script in ("sleep 60; echo 1 > /root/left", "echo 1 > /root/left"):
            command = {"argv": ["sh", "-c", script]}
            answers.append(CLIENT.post(f"{call['sandbox']}/exec", json=command).status_code)

    begun_at = time.monotonic()
    reward, metrics = played_by(work, tmp_path, "[agent]\ntimeout_sec = 1.0", JUDGED_SLOWLY)
    assert time.monotonic() - begun_at < 20
    assert (reward, metrics["agent_timed_out"]) == ({"reward": 0.0}, 1.0)
    assert answers == [410, 410]


def test_a_harness_that_cannot_run_just_now_is_asked_again_in_a_new_sandbox(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLost, match="cannot run the agent just now: 503"):
        played_by(lambda _: None, tmp_path, status=503)
