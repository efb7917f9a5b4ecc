"""No process that a benchmark started outlives it, whatever ends the benchmark."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.process_group import started
from service.startup.config import free_port
from tests.growing_limits import in_the_middle
from tests.paths import REPOSITORY

pytestmark = pytest.mark.slow
ENDS_WITHIN_S = 60
"""Far more than it takes, for machines that are busy."""
SERVER = """
import http.server, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stubborn = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(600)"
parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}, sys.argv[1]])"
subprocess.run([sys.executable, "-c", parent, sys.argv[2]], start_new_session=True)
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *arguments):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""
BENCHMARK = """
import os, sys, time
from benchmarks import process_group
*arguments, limit_s = sys.argv[1:]
process_group.ABORT_TIMEOUT_S = process_group.END_TIMEOUT_S = process_group.SWEEP_TIMEOUT_S = float(limit_s)
process_group.POLL_S = 0.05
server, port, mark, what = arguments
command = [sys.executable, "-c", server, port, mark]
with process_group.no_process_left(), process_group.started(command, f"http://127.0.0.1:{port}", os.environ) as group:
    if what == "suspend":
        group.suspend()
    print("ready", flush=True)
    if what == "fail":
        raise RuntimeError("the measurement failed")
    if what != "finish":
        time.sleep(600)
"""


def benchmark(mark: Path, what: str, limit_s: float = 0.3) -> "subprocess.Popen[str]":
    """Starts a benchmark and waits until it runs. Its processes ignore SIGINT and SIGTERM; one is an orphan.

    Args:
        limit_s: how long it waits for them to end before it goes further.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", BENCHMARK, SERVER, str(free_port()), str(mark), what, str(limit_s)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'clients'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def processes_of(mark: Path) -> list[psutil.Process]:
    """Those that have the mark in their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if str(mark) in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize(
    ("what", "sent", "exit_code"),
    [
        ("wait", signal.SIGINT, -signal.SIGINT),
        ("wait", signal.SIGTERM, 128 + signal.SIGTERM),
        ("suspend", signal.SIGTERM, 128 + signal.SIGTERM),
        ("fail", None, 1),
        ("finish", None, 0),
    ],
)
def test_all_processes_of_a_benchmark_end_with_it(
    tmp_path: Path, what: str, sent: signal.Signals | None, exit_code: int
) -> None:
    process = benchmark(tmp_path, what)
    if sent is not None:
        assert len(processes_of(tmp_path)) == 3, "the benchmark, its server, and an orphan of the server"
        process.send_signal(sent)
    _, errors = process.communicate(timeout=ENDS_WITHIN_S)
    assert (process.returncode, processes_of(tmp_path)) == (exit_code, []), errors


def test_a_second_signal_does_not_interrupt_the_end_of_the_processes(tmp_path: Path) -> None:
    def attempt(limit_s: float) -> tuple[bool, int, list[psutil.Process]]:
        """Whether it got all signals while it ended its processes, and what became of it."""
        process = benchmark(tmp_path, "wait", limit_s)
        process.send_signal(signal.SIGTERM)
        got_all = True
        for _ in range(5):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
                got_all = False
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=4 * limit_s + ENDS_WITHIN_S)
        return got_all, process.returncode, processes_of(tmp_path)

    assert in_the_middle(attempt, has_begun=lambda ended: ended[0]) == (True, 128 + signal.SIGTERM, [])


def test_a_command_that_does_not_start_is_shown_with_its_output() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        pytest.raises(RuntimeError, match="did not start:\nno such model"),
        started(command, f"http://127.0.0.1:{free_port()}", os.environ),
    ):
        pass
