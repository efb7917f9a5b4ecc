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

from benchmarks.process_group import command_of, is_engine, send
from deployments.workers.cleanup import MARK
from rollout_client import RolloutClient, Sampling
from service.startup.config import free_port
from service.startup.processes import wait_for_ends
from tests.endurance.chaos.counted_puzzle import StepLog, counted_puzzle, turns_done_again
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


def written(config: object, folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def config_with_time_to_end(folder: Path) -> Path:
    """Of simulated engines, on which rollouts under way have minutes to end: a busy machine makes them slower."""
    config = yaml.safe_load(SIMULATED.read_text())
    for deployment in config["applications"][0]["deployments"]:
        deployment["num_replicas"] = 1
        if deployment["name"] == "Ingress":
            deployment["graceful_shutdown_timeout_s"] = ENDED_WITHIN_S
    return written(config, folder)


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


GAMES, TURNS = 256, 8


def config_with_stores(folder: Path) -> Path:
    """The example config with the counted game, and with all that is stored below `folder`."""
    config = yaml.safe_load(CONFIG.read_text())
    [application] = config["applications"]
    application["args"]["environments"] = {"counted": counted_puzzle(folder / "steps")}
    application["args"] |= {store: {"folder": str(folder / store)} for store in ("jobs", "policy", "sessions")}
    application["deployments"] = application["deployments"][:2]
    return written(config, folder)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_outlives_the_whole_service_and_repeats_no_finished_turn(tmp_path: Path) -> None:
    steps, port = StepLog(tmp_path / "steps"), free_port()
    arguments = (str(config_with_stores(tmp_path)), "--port", str(port))
    with RolloutClient(f"http://127.0.0.1:{port}") as client:
        with service_process(*arguments) as service:
            lines_until(service, "Routes and their fields")
            hot = Sampling(temperature=1.5, max_new_tokens=16, ignore_eos=True)
            games = client.example_samples("counted", GAMES, seed=3)
            job = client.jobs.submit(games, sampling=hot, max_rollout_turns=TURNS).job_id
            while steps.end() == 0 or steps.since(0).total() < GAMES * TURNS / 3:
                time.sleep(0.1)
            service.terminate()
            while parts := psutil.Process(service.pid).children(recursive=True):
                for process in parts:
                    send(process, signal.SIGKILL)
                assert wait_for_ends(parts, ENDED_WITHIN_S) == []
            service.kill()
        with service_process(*arguments) as service:
            lines_until(service, "Routes and their fields")
            ended = {each.position: each.sample for event in client.jobs.events(job) for each in event.samples or ()}
            service.terminate()
            service.communicate(timeout=ENDED_WITHIN_S)
    assert [ended[position].error for position in range(GAMES)] == [None] * GAMES
    turns = {position: sample.metrics.turn_count for position, sample in ended.items()}
    assert {(game, turn + 1) for game, count in turns.items() for turn in range(count)} == set(steps.since(0))
    # The step of a turn whose result was not stored yet.
    assert max(turns_done_again(steps.since(0)).values(), default=0) <= 1
