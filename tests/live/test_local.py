"""Starting and stopping the service as a user does: nothing is left behind, and what goes wrong is a sentence."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
import pytest
import yaml

from benchmarks.process_group import command_of, is_engine
from deployments.workers.cleanup import MARK
from service.startup.config import free_port
from tests.live.service_process import lines_until, service_process
from tests.paths import REPOSITORY

CONFIG = REPOSITORY / "serve_config.cpu.yaml"
SIMULATED = REPOSITORY / "serve_config.scale.yaml"
STARTED_WITHIN_S = 180
ENDED_WITHIN_S = 120


def family(service: subprocess.Popen[str], until: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """All descendants of the service, once one of them is such a one."""
    deadline = time.monotonic() + STARTED_WITHIN_S
    while time.monotonic() < deadline:
        descendants = psutil.Process(service.pid).children(recursive=True)
        if any(until(process) for process in descendants):
            return descendants
        time.sleep(0.5)
    commands = "\n".join(command_of(process) for process in descendants)
    pytest.fail(f"no such process within {STARTED_WITHIN_S} s, only:\n{commands}")


def is_controller(process: psutil.Process) -> bool:
    return "ServeController" in command_of(process)


def alive(processes: list[psutil.Process]) -> list[str]:
    return [command_of(process) for process in processes if process.is_running()]


@pytest.mark.long
@pytest.mark.parametrize(
    ("stop_signal", "during", "exit_code"),
    # An engine that has begun would outlive what started it.
    [(signal.SIGINT, is_controller, 130), (signal.SIGTERM, is_engine, 0)],
)
def test_a_service_stopped_at_its_start_leaves_no_process_and_no_socket(
    stop_signal: signal.Signals, during: Callable[[psutil.Process], bool], exit_code: int
) -> None:
    with (
        # The paths of Ray's sockets must be short.
        TemporaryDirectory(prefix="t") as folder,
        service_process(str(CONFIG), "--port", str(free_port()), TMPDIR=folder) as service,
    ):
        processes = family(service, until=during)
        service.send_signal(stop_signal)
        printed, _ = service.communicate(timeout=ENDED_WITHIN_S)
        assert [path for path in Path(folder).rglob("*") if path.is_socket()] == []
        assert list(Path(folder).glob(f"{MARK}-*")) == []
    assert service.returncode == exit_code
    assert printed.startswith("Starting Ray\nStarting Ray Serve (")
    assert printed.endswith("Stopping the service\nThe service has stopped.\n")
    assert alive(processes) == []


def body(max_new_tokens: int) -> dict[str, object]:
    sample = {"task_name": "three_tokens", "messages": [{"role": "user", "content": "Hi"}]}
    return {"samples": [sample], "sampling": {"max_new_tokens": max_new_tokens}, "max_rollout_turns": 1}


def config_with_time_to_end(folder: Path) -> Path:
    """Of simulated engines, on which rollouts under way have minutes to end: a busy machine makes them slower."""
    config = yaml.safe_load(SIMULATED.read_text())
    for deployment in config["applications"][0]["deployments"]:
        deployment["num_replicas"] = 1
        if deployment["name"] == "Ingress":
            deployment["graceful_shutdown_timeout_s"] = ENDED_WITHIN_S
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_after_sigterm_new_requests_are_refused_and_old_ones_finished(tmp_path: Path) -> None:
    with (
        service_process(str(config_with_time_to_end(tmp_path)), "--port", str(port := free_port())) as service,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ENDED_WITHIN_S) as client,
    ):
        lines_until(service, "Routes and their fields")
        # Its 900 tokens take 18 s: on a busy machine it may take some of them until the service looks at the signal.
        with client.stream("POST", "/v1/rollout", json=body(900), headers={"Accept": "application/x-ndjson"}) as answer:
            service.terminate()
            while (refused := client.post("/v1/rollout", json=body(1))).is_success:
                time.sleep(0.1)
            rollout, summary = map(json.loads, answer.iter_lines())
        printed, _ = service.communicate(timeout=ENDED_WITHIN_S)
    assert "could not be waited for" not in printed
    assert "have not ended" not in printed
    assert (refused.status_code, refused.json()["type"]) == (503, "urn:rollout:problem:not-ready")
    assert rollout["sample"]["status"] == "max_turns"
    assert rollout["sample"]["metrics"]["turn_gen_tokens"] == [900]
    assert summary["summary"]["metrics"]["total_turns"] == 1
    assert service.returncode == 0
    assert "The service has stopped." in printed
