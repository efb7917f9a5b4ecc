"""The load test with locust, in processes of their own: importing locust changes sockets and threads to gevent's."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.responses import JSONResponse

from service.startup.config import free_port
from tests.clients.scripted_service import DIED, SUMMARY, ScriptedService, result
from tests.paths import REPOSITORY

pytestmark = pytest.mark.slow
ENOUGH_REQUESTS = 60
LIMIT_S = 50.0
Finished = subprocess.CompletedProcess[str]


@contextmanager
def started(url: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "locust", "-f", "clients/locustfile.py", "-u", "6", "-r", "6", "--host", url]
    with subprocess.Popen(
        [*command, *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: "subprocess.Popen[str]") -> Finished:
    output, _ = process.communicate(timeout=LIMIT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def until_enough(service: ScriptedService, *arguments: str) -> Finished:
    """Runs locust until the service has got enough requests, or until it ends by itself."""
    enough = len(service.bodies) + ENOUGH_REQUESTS
    give_up_at = time.monotonic() + LIMIT_S
    with started(service.url, "--headless", "-t", f"{LIMIT_S:.0f}s", *arguments) as process:
        while len(service.bodies) < enough and process.poll() is None and time.monotonic() < give_up_at:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        return ended(process)


def last_line(done: Finished) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return document


def failing(service: ScriptedService) -> None:
    answer = {**SUMMARY, "samples": [result(status="error", error=DIED)]}
    service.rollouts.extend([lambda _: JSONResponse(answer)] * 100_000)


def test_every_class_that_is_on_by_default_plays_and_nothing_fails(service: ScriptedService) -> None:
    done = until_enough(service)
    assert done.returncode == 0, done.stdout
    posted = {(len(b["samples"]), b["num_generations"], b["max_rollout_turns"], b["priority"]) for b in service.bodies}
    assert posted == {(1, 1, 4, "interactive"), (4, 8, 4, "train"), (1, 1, 16, "train")}
    assert {body["sampling"]["max_new_tokens"] for body in service.bodies} == {32}
    line = last_line(done)
    assert line["exit_code"] == 0
    assert set(line["latency"]) == {f"/rollout ({one})" for one in ("interactive", "groups", "multi-turn", "streaming")}
    assert line["first_rollout"]["requests"] > 0
    assert line["tokens_per_s"] == pytest.approx(2 * line["rollouts_per_s"], rel=0.001)


def test_the_load_test_fails_when_rollouts_do_and_says_with_which_kind(service: ScriptedService) -> None:
    failing(service)
    alone = ("--classes", "interactive")
    done = until_enough(service, *alone)
    assert done.returncode == 1
    assert "interactive failed with generation, here first: The replica died." in done.stdout
    line = last_line(done)
    assert line["errors"] == {"generation": line["requests"]}
    assert line["broken"] == ["100.00% of the requests failed; 1.00% may."]
    assert until_enough(service, *alone, "--max-error-rate", "1").returncode == 0


def test_a_run_that_is_too_slow_fails(service: ScriptedService) -> None:
    done = until_enough(service, "--classes", "groups", "--min-tokens-per-s", "1e9", "--max-p95-s", "1e-9")
    assert done.returncode == 1
    assert [sentence.split(":")[0] for sentence in last_line(done)["broken"]] == [
        f"There were {last_line(done)['tokens_per_s']:.1f} tokens a second; 1e+09 are wanted.",
        "/rollout (groups)",
    ]


@pytest.mark.long
def test_a_master_has_the_metrics_of_its_workers(service: ScriptedService) -> None:
    port = str(free_port())
    where = ("--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port)
    done = until_enough(service, "--processes", "2", *where, "--classes", "groups", "--group-size", "3")
    assert done.returncode == 0, done.stdout
    line = last_line(done)
    # What is under way when the run ends is neither a request nor rollouts.
    assert line["rollouts"] == 12 * line["requests"] > 0
    assert line["rollouts"] <= 12 * len(service.bodies)
    assert line["statuses"] == {"completed": line["rollouts"]}


@pytest.mark.parametrize(
    ("url", "arguments", "sentence"),
    [
        ("http://127.0.0.1:9", [], "No samples, no test: http://127.0.0.1:9 cannot be reached"),
        (None, ["--classes", "interactive,pusher"], "The class pusher needs weights to push: --push-weights FILE_OR_"),
    ],
)
def test_a_load_test_that_cannot_begin_says_why(
    service: ScriptedService, url: str | None, arguments: list[str], sentence: str
) -> None:
    with started(url or service.url, "--headless", *arguments) as process:
        done = ended(process)
    assert (done.returncode, sentence in done.stdout, service.bodies) == (1, True, [])
