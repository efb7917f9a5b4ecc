"""The load test with locust: its exit code says whether rollouts failed."""

import signal
import subprocess
import sys
import time

import pytest
from starlette.responses import JSONResponse

from tests.clients.scripted_service import SUMMARY, ScriptedService, result
from tests.paths import REPOSITORY

pytestmark = pytest.mark.slow
ENOUGH_REQUESTS = 40
LIMIT_S = 50.0


def locust(service: ScriptedService, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs locust until the service has got enough requests, or until it ends by itself."""
    command = [sys.executable, "-m", "locust", "-f", "clients/locustfile.py", "--headless", "-u", "2", "-r", "2"]
    enough = len(service.bodies) + ENOUGH_REQUESTS
    give_up_at = time.monotonic() + LIMIT_S
    with subprocess.Popen(
        [*command, "-t", f"{LIMIT_S:.0f}s", "--host", service.url, *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        while len(service.bodies) < enough and process.poll() is None and time.monotonic() < give_up_at:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def test_the_load_test_passes_when_nothing_fails(service: ScriptedService) -> None:
    done = locust(service)
    assert done.returncode == 0, done.stdout
    assert {body.get("num_generations") for body in service.bodies} == {1, 8}
    assert {body["samples"][0]["task_name"] for body in service.bodies} == {"math", "sliding_puzzle"}
    assert {body["sampling"]["max_new_tokens"] for body in service.bodies} == {32}


def test_the_load_test_fails_when_samples_do(service: ScriptedService) -> None:
    error = {"kind": "generation", "message": "The replica died.", "retryable": True}
    answer = {**SUMMARY, "samples": [result(status="error", error=error)]}
    service.rollouts.extend([lambda _: JSONResponse(answer)] * 100_000)
    done = locust(service)
    assert done.returncode == 1
    assert "rollouts failed, the first with generation: The replica died." in done.stdout + done.stdout
    assert locust(service, "--max-error-rate", "1").returncode == 0


def test_the_load_test_fails_when_there_is_no_service() -> None:
    unserved = ScriptedService()
    unserved.url = "http://127.0.0.1:9"
    done = locust(unserved)
    assert done.returncode == 1
    assert "No samples, no test: http://127.0.0.1:9 cannot be reached" in done.stdout
