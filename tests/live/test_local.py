"""Starting and stopping the service as a user does: nothing is left behind, and what goes wrong is a sentence."""

import signal
import socket
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest

from benchmarks.process_group import command_of, is_engine
from service.startup.ports import free_port
from tests.live.service_process import service_process
from tests.paths import REPOSITORY

CONFIG = REPOSITORY / "serve_config.cpu.yaml"
STARTED_WITHIN_S = 180


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


def is_worker_of_an_engine(process: psutil.Process) -> bool:
    """The engine has begun by then, and would outlive what started it."""
    parent = process.parent() if is_engine(process) else None
    return parent is not None and is_engine(parent)


def is_controller(process: psutil.Process) -> bool:
    return "ServeController" in command_of(process)


def alive(processes: list[psutil.Process]) -> list[str]:
    return [command_of(process) for process in processes if process.is_running()]


@pytest.mark.parametrize(
    ("stop_signal", "during", "exit_code"),
    [(signal.SIGINT, is_controller, 130), (signal.SIGTERM, is_worker_of_an_engine, 0)],
)
def test_a_service_that_is_stopped_while_it_starts_leaves_no_process(
    stop_signal: signal.Signals, during: Callable[[psutil.Process], bool], exit_code: int
) -> None:
    with service_process(str(CONFIG), "--port", str(free_port())) as service:
        processes = family(service, until=during)
        service.send_signal(stop_signal)
        printed, _ = service.communicate(timeout=60)
    assert service.returncode == exit_code
    assert "The service has stopped." in printed
    assert alive(processes) == []


def test_a_taken_port_is_a_sentence_and_starts_nothing() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with service_process(str(CONFIG), "--port", str(port)) as service:
            printed, _ = service.communicate(timeout=60)
    assert printed.strip() == f"Port {port} on 127.0.0.1 is taken: stop what uses it or choose another."
    assert service.returncode == 1
