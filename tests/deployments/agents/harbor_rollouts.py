"""Rollouts of the three example tasks, whose right rewards are known, and their processes that can be killed."""

import random
from collections.abc import Iterator
from typing import Any

import psutil

from tests.paths import REPOSITORY

TASKS = REPOSITORY / "examples" / "harbor"
NAMES = ("count-lines", "fix-median", "greet-server")
AGENT = """
import json, os, subprocess, sys, time, urllib.request as web
sample = json.load(sys.stdin)
body = json.dumps({"model": "any", "messages": sample["messages"], "max_tokens": 8}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
for _ in range(sample["extra_env_info"].get("calls", 1)):
    web.urlopen(web.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
time.sleep(sample["extra_env_info"].get("works_s", 0))
subprocess.run(["bash", "-c", sample["extra_env_info"]["script"]], check=True)
"""
"""It asks the model, then does what its sample says."""
COMMAND: dict[str, Any] = {"argv": ["python3", "-c", AGENT], "sandbox": True}
KILLED = {"sandbox": "/run/rollout/init.py", "agent": "import json, os, subprocess, sys, time", "verifier": "/tests/"}
"""Marks in the command lines of what is killed."""


def solution(name: str) -> str:
    return (TASKS / name / "solution" / "solve.sh").read_text()


def sample_of(number: int, **info: Any) -> dict[str, Any]:
    """Every second one solves its task."""
    name = NAMES[number % len(NAMES)]
    script = solution(name) if reward_of(number) else "true"
    return {
        "task_name": "tasks",
        "id": str(number),
        "messages": [{"role": "user", "content": f"Question {number}"}],
        "extra_env_info": {"task": f"examples/{name}", "script": script, **info},
    }


def reward_of(number: int) -> float:
    return float(number // len(NAMES) % 2)


def processes_with(mark: str) -> Iterator[psutil.Process]:
    """Descendants of this process whose command line has the mark."""
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and mark in " ".join(process.cmdline()):
                yield process
        except psutil.NoSuchProcess:
            continue


def strike(mark: str, draw: random.Random) -> bool:
    """Kills one process with the mark; returns whether there was one."""
    if not (found := list(processes_with(mark))):
        return False
    try:
        draw.choice(found).kill()
    except psutil.NoSuchProcess:
        return False
    return True
