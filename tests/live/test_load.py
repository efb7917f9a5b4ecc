"""The load test against the running service."""

import json
import subprocess
import sys

import pytest

from tests.paths import REPOSITORY

CLASSES = {"interactive", "groups", "multi-turn", "streaming"}


@pytest.mark.long
def test_every_class_of_users_plays_on_the_service(service_url: str) -> None:
    command = [
        *(sys.executable, "-m", "locust", "-f", "clients/locustfile.py", "--headless", "--host", service_url),
        *("-u", "4", "-r", "4", "-t", "20s", "--only-summary", "--tasks", "math,sliding_puzzle"),
        *("--classes", ",".join(sorted(CLASSES)), "--group-size", "2", "--max-p95-s", "60"),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.strip().splitlines()[-1])
    assert set(line["latency"]) == {f"/rollout ({kind})" for kind in CLASSES}
    assert (line["errors"], line["broken"]) == ({}, [])
    assert line["tokens_per_s"] > line["turns_per_s"] > line["rollouts_per_s"] > 0
    assert line["first_rollout"]["p50_s"] <= line["latency"]["/rollout (streaming)"]["p50_s"]
