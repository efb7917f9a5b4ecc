"""`make compose-test` without Docker: a stand-in for compose notes what it is asked, the service is scripted."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.clients.scripted_service import served
from tests.paths import REPOSITORY

SCRIPT = REPOSITORY / "docker" / "compose_test.py"
WALLS = "rollout\\ntouch: Read-only file system\\nCapEff:\\t0000000000000000\\nNoNewPrivs:\\t1"
LINE = json.dumps({"rollouts": 9, "exit_code": 0})


@pytest.fixture
def answers() -> Iterator[tuple[str, dict[str, Any]]]:
    """One server in the place of the service and of Prometheus, and what it answers."""
    app = FastAPI()
    given: dict[str, Any] = {"statuses": ["completed"] * 4, "rollouts": "25"}

    @app.get("/readyz")
    def readyz() -> dict[str, str]:
        return {"status": "ready"}

    @app.post("/rollout")
    def rollout() -> Any:
        return {"samples": [{"status": status} for status in given["statuses"]]}

    @app.get("/api/v1/query")
    def query(query: str) -> Any:
        assert query == "sum(ray_rollout_rollouts_total)"
        return {"data": {"result": [{"value": [0, given["rollouts"]]}]}}

    with served(app) as url:
        yield url, given


def compose_test(
    folder: Path, url: str, fails_at: str = "no-such-command", *arguments: str
) -> tuple[int, str, list[str]]:
    """Exit code, output, and the commands that compose was given. It fails at the first that begins with `fails_at`."""
    log, compose = folder / "log", folder / "compose"
    compose.write_text(f"""#!/bin/sh
echo "$*" | sed 's/.*compose.yaml //' >> {log}
case "$*" in
    *"{fails_at}"*) exit 3;;
    *exec*) printf '{WALLS}\\n';;
    *"run --rm"*) echo '{LINE}';;
esac
""")
    compose.chmod(compose.stat().st_mode | stat.S_IEXEC)
    port = url.rpartition(":")[2]
    patched = f"import runpy, socket, sys; sys.argv = {[str(SCRIPT), *arguments]!r}\n" + (
        "class Socket:\n"
        "    __enter__ = lambda self: self\n"
        "    __exit__ = bind = lambda *_: None\n"
        f"    getsockname = lambda self: ('127.0.0.1', {port})\n"
        "real, socket.socket = socket.socket, Socket\n"
        "import http.client\n"
        "module = runpy.run_path(sys.argv[0])\n"
        "containers = module['Containers']()\n"
        "socket.socket = real\n"
        "module['main'].__globals__['Containers'] = lambda: containers\n"
        "sys.exit(module['main']())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", patched],
        env={**os.environ, "COMPOSE": str(compose)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, log.read_text().splitlines()


def test_it_builds_starts_asks_and_takes_down(tmp_path: Path, answers: tuple[str, dict[str, Any]]) -> None:
    code, said, commands = compose_test(tmp_path, answers[0], "no-such-command", "--without", "grafana")
    assert code == 0, said
    assert "25 rollouts" in said
    assert "All of it worked" in said
    assert [command for command in commands if not any(word in command for word in ("config", "exec", "ps -q"))] == [
        "build cpu load",
        "up --detach --no-build cpu prometheus",
        "up --detach --no-build load-worker",
        "run --rm --use-aliases -T load --headless -u 4 -r 4 -t 20s --only-summary",
        "--profile cpu --profile gpu --profile cluster --profile load --profile observability"
        " down --volumes --remove-orphans --timeout 60",
    ]


@pytest.mark.parametrize("fails_at", ["up --detach", "exec", "run --rm"])
def test_what_fails_is_said_with_logs_and_everything_is_taken_down(
    tmp_path: Path, answers: tuple[str, dict[str, Any]], fails_at: str
) -> None:
    code, said, commands = compose_test(tmp_path, answers[0], fails_at, "--without", "grafana", "--no-build")
    assert code == 1
    assert f"Failed: compose {fails_at}" in said
    assert [" logs " in commands[-2], " down " in commands[-1]] == [True, True]


def test_rollouts_that_fail_fail_the_test(tmp_path: Path, answers: tuple[str, dict[str, Any]]) -> None:
    answers[1]["statuses"] = ["completed", "completed", "completed", "error"]
    code, said, commands = compose_test(tmp_path, answers[0], "no-such-command", "--no-build", "--without", "grafana")
    assert code == 1
    assert "POST /rollout answered 200 with ['completed', 'completed', 'completed', 'error']" in said
    assert " down " in commands[-1]


def test_only_building_starts_nothing(tmp_path: Path, answers: tuple[str, dict[str, Any]]) -> None:
    code, _, commands = compose_test(tmp_path, answers[0], "no-such-command", "--build-only", "--service", "cluster")
    assert (code, commands[-1]) == (0, "build ray-head load")
