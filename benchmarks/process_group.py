"""The processes that a benchmark starts: their cost, how they are suspended, and that none outlives the benchmark."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import IO, NoReturn

import httpx
import psutil

from service.startup.processes import adopt_orphans, wait_for_ends

ENGINE_MARKS = ("VLLM::", "multiprocessing.spawn")
"""The command line of each process of an engine contains one of these: its title, or how it was started.

The title alone does not suffice: setproctitle has no effect in a process that has changed the first variable of its
environment.
"""
START_TIMEOUT_S = 600
POLL_S = 0.5
END_TIMEOUT_S = 60
ABORT_TIMEOUT_S = 4
"""A benchmark that was interrupted gives its processes less time to end."""
SWEEP_TIMEOUT_S = 2
SWEEPS = 3
"""A process that was being started while its parent ended shows up in the next sweep."""
SHOWN_OUTPUT_BYTES = 4000
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def no_process_left() -> Iterator[None]:
    """Ends every process that was started in the block, also after an error, Ctrl-C, SIGTERM or SIGHUP.

    Raises:
        KeyboardInterrupt: on SIGINT.
        SystemExit: on SIGTERM and SIGHUP, with the exit code of a shell, 128 + signal.
    """
    adopt_orphans()
    previous = {number: signal.signal(number, raise_once) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        ignore_ending_signals()
        end_descendants()
    # After an error or a signal they stay ignored: the benchmark ends then.
    for number, handler in previous.items():
        signal.signal(number, handler)


def raise_once(number: int, _frame: object) -> NoReturn:
    """Starts the end of all groups at once. A second signal must not interrupt it."""
    ignore_ending_signals()
    for group in running_groups:
        group.ask_to_end()
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def ignore_ending_signals() -> None:
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_descendants() -> None:
    """Asks all descendants to end, and kills those that do not within `SWEEP_TIMEOUT_S`."""
    for _ in range(SWEEPS):
        descendants = [process for process in psutil.Process().children(recursive=True) if not is_tracker(process)]
        for process in descendants:
            send(process, signal.SIGTERM)
            send(process, signal.SIGCONT)
        alive = wait_for_ends(descendants, SWEEP_TIMEOUT_S)
        for process in alive:
            send(process, signal.SIGKILL)
        wait_for_ends(alive, SWEEP_TIMEOUT_S)


def is_tracker(process: psutil.Process) -> bool:
    """Python's own helper process for shared memory, which ends with this process."""
    return bool(process.pid == resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Does nothing if the process has ended."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


class ProcessGroup:
    """One process and its descendants; which ones these are is looked up at each call."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._engine: set[int] = set()
        self._is_asked_to_end = False

    def _all(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def seconds_outside_engine(self) -> dict[int, float]:
        """CPU seconds so far (user and system) by pid, of all processes that are not the engine's own.

        Raises:
            RuntimeError: no process belongs to an engine.
        """
        everyone = self._all()
        # A process stays the engine's, and so are its children; psutil lists parents before their children.
        for process in everyone:
            if is_engine(process) or parent_of(process) in self._engine:
                self._engine.add(process.pid)
        if not self._engine:
            raise RuntimeError(f"No process below {self._root.pid} belongs to an engine.")
        outside = (process for process in everyone if process.pid not in self._engine)
        return {process.pid: seconds for process in outside if (seconds := cpu_seconds_of(process)) is not None}

    def suspend(self) -> None:
        """Stops all of them, so that they take no CPU time while something else is measured."""
        for process in self._all():
            send(process, signal.SIGSTOP)

    def resume(self) -> None:
        for process in reversed(self._all()):
            send(process, signal.SIGCONT)

    @contextmanager
    def awake(self, idle_s: float) -> Iterator[None]:
        """Resumes them for the length of the block, which begins `idle_s` seconds later.

        An error leaves them running: processes that are suspended again could not end by themselves after a signal.
        """
        self.resume()
        time.sleep(idle_s)
        yield
        self.suspend()

    def ask_to_end(self) -> None:
        """Interrupts the first process, as Ctrl-C would; only once, because a second time would interrupt its end."""
        if not self._is_asked_to_end:
            self._is_asked_to_end = True
            self.resume()
            send(self._root, signal.SIGINT)

    def end(self, timeout_s: float) -> None:
        """Asks it to end; kills all processes that have not ended after `timeout_s`."""
        everyone = self._all()
        self.ask_to_end()
        for process in wait_for_ends(everyone, timeout_s):
            send(process, signal.SIGKILL)


running_groups: list[ProcessGroup] = []
"""Those of `started`."""


@contextmanager
def started(command: Sequence[str], ready_url: str, environment: Mapping[str, str]) -> Iterator[ProcessGroup]:
    """Runs a command for the length of the block, which begins when `ready_url` answers.

    The command has a session of its own: signals of the terminal reach the benchmark alone, which then ends it.

    Raises:
        RuntimeError: it ended, or was not ready in time; with the end of its output.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        processes = ProcessGroup(process.pid)
        running_groups.append(processes)
        timeout_s = ABORT_TIMEOUT_S
        try:
            until = time.monotonic() + START_TIMEOUT_S
            while not answers(ready_url):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{' '.join(command)} did not start:\n{end_of(output)}")
                time.sleep(POLL_S)
            yield processes
            timeout_s = END_TIMEOUT_S
        finally:
            if process.poll() is None:
                processes.end(timeout_s)
            process.wait()
            running_groups.remove(processes)


def end_of(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - SHOWN_OUTPUT_BYTES))
    return output.read().decode(errors="replace").strip()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.HTTPError:
        return False


def is_engine(process: psutil.Process) -> bool:
    command = command_of(process)
    return any(mark in command for mark in ENGINE_MARKS)


def command_of(process: psutil.Process) -> str:
    """Its command line, or the title that it has set; empty for a process that has ended or is not accessible."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def parent_of(process: psutil.Process) -> int | None:
    """`None` for a process that has ended."""
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def cpu_seconds_of(process: psutil.Process) -> float | None:
    """`None` for a process that has ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return None
    return times.user + times.system


class CpuTime:
    """CPU seconds of this process and of a group outside its engine, since this object was made."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self._before = self._read_group()
        # The CPU time of the two readings of the group is not counted: last here, and first in `seconds`.
        self._own_before = time.process_time()

    def _read_group(self) -> dict[int, float]:
        return self._group.seconds_outside_engine() if self._group else {}

    def seconds(self) -> float:
        own = time.process_time() - self._own_before
        after = self._read_group()
        return own + sum(seconds - self._before.get(pid, 0.0) for pid, seconds in after.items())
