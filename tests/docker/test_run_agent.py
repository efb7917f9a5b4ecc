"""`docker/run-agent.sh`, with a program in the place of Docker that notes how it is called."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker" / "run-agent.sh"
DOCKER = """#!/bin/sh
echo "$@" >> "$NOTES"
[ "$1" = rm ] || exec sleep "$RUNS_FOR_S"
"""
REPLICA = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(600)"


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the calls of Docker, a line each. The script runs in the folder `run` beside it."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return tmp_path / "notes"


def calls(notes: Path) -> list[str]:
    return notes.read_text().splitlines() if notes.exists() else []


def wait_for(notes: Path, count: int) -> list[str]:
    until = time.monotonic() + 60
    while len(calls(notes)) < count and time.monotonic() < until:
        time.sleep(0.05)
    return calls(notes)


def test_the_container_has_its_folder_and_its_session_variables(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS_FOR_S", "0")
    folder = notes.with_name("run")
    script = subprocess.Popen(
        [SCRIPT, "--memory=2g", "my-agent", "python", "-m", "mine"], cwd=folder, start_new_session=True
    )
    assert script.wait(60) == 0
    os.killpg(script.pid, signal.SIGKILL)
    [call] = calls(notes)
    words = call.split()
    assert words[:5] == ["run", "--rm", "--init", "--interactive", "--name=rollout-agent-run"]
    assert {f"--volume={folder}:{folder}", f"--user={os.getuid()}:{os.getgid()}"} <= set(words)
    assert [word for word in words if word.startswith("--env=")] == [
        "--env=OPENAI_BASE_URL",
        "--env=OPENAI_API_KEY",
        "--env=ANTHROPIC_BASE_URL",
        "--env=ANTHROPIC_API_KEY",
        "--env=ROLLOUT_SAMPLE_FILE",
        "--env=ROLLOUT_REWARD_FILE",
    ]
    assert words[-5:] == ["--memory=2g", "my-agent", "python", "-m", "mine"]


@pytest.mark.slow
def test_the_container_of_a_replica_that_is_killed_is_removed(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS_FOR_S", "120")
    command = [sys.executable, "-c", REPLICA, str(SCRIPT), "my-agent"]
    with subprocess.Popen(command, cwd=notes.with_name("run"), start_new_session=True) as replica:
        try:
            assert len(wait_for(notes, 1)) == 1
            replica.kill()
            replica.wait()
            assert wait_for(notes, 2)[1:] == ["rm --force rollout-agent-run"]
        finally:
            os.killpg(replica.pid, signal.SIGKILL)
