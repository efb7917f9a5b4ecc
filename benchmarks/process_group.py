"""A process and all its descendants: what they cost, and a way to let them rest."""

import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx
import psutil

ENGINE_MARKS = ("VLLM::", "multiprocessing.spawn")
"""One of these is in the command line of each process of an engine: the title that vLLM gives it, or how it started.

Not the title alone: setproctitle does nothing in a process that has changed the first variable of its environment.
"""
START_WITHIN_S = 600
POLL_S = 0.5
END_WITHIN_S = 60


class ProcessGroup:
    """Everything below and including one process, as it is at the moment of each call."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._engine: set[int] = set()

    def _all(self) -> list[psutil.Process]:
        return [self._root, *self._root.children(recursive=True)]

    def seconds_outside_engine(self) -> dict[int, float]:
        """Processor seconds so far (user and system) by pid, of all processes that are not the engine's own.

        Raises:
            RuntimeError: none of the processes is an engine's.
        """
        everyone = self._all()
        # Once an engine always an engine, and so are those that it started: parents come before their children here.
        for process in everyone:
            if is_engine(process) or parent_of(process) in self._engine:
                self._engine.add(process.pid)
        if not self._engine:
            raise RuntimeError(f"None of the processes below {self._root.pid} is an engine's.")
        outside = (process for process in everyone if process.pid not in self._engine)
        return {process.pid: seconds for process in outside if (seconds := cost_of(process)) is not None}

    def rest(self) -> None:
        """Stops all of them where they are, so that they cost nothing while something else is measured."""
        for process in self._all():
            process.suspend()

    def go_on(self) -> None:
        for process in reversed(self._all()):
            process.resume()

    def end(self) -> None:
        """Asks the first process to end, as Ctrl-C would; kills what is left after a minute."""
        everyone = self._all()
        self.go_on()
        self._root.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(everyone, timeout=END_WITHIN_S)
        for process in alive:
            process.kill()


@contextmanager
def started(command: Sequence[str], ready_url: str, environment: Mapping[str, str]) -> Iterator[ProcessGroup]:
    """Runs a command for the length of the block, which begins when `ready_url` answers.

    Raises:
        RuntimeError: it ended, or was not ready in time.
    """
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
    processes = ProcessGroup(process.pid)
    try:
        until = time.monotonic() + START_WITHIN_S
        while not answers(ready_url):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(
                    f"{' '.join(command)} did not start (exit code {process.poll()}); run it to see why."
                )
            time.sleep(POLL_S)
        yield processes
    finally:
        if process.poll() is None:
            processes.end()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.HTTPError:
        return False


def is_engine(process: psutil.Process) -> bool:
    command = command_of(process)
    return any(mark in command for mark in ENGINE_MARKS)


def command_of(process: psutil.Process) -> str:
    """Its title if it has given itself one; empty for a process that has ended or cannot be looked at."""
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


def cost_of(process: psutil.Process) -> float | None:
    """`None` for a process that has ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return None
    return times.user + times.system


class ProcessorTime:
    """Between two readings: the processor seconds of this process's own work and a group's, outside the engine."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self._before = self._read_group()
        # Last here and first there: what the readings themselves cost is nobody's.
        self._own_before = time.process_time()

    def _read_group(self) -> dict[int, float]:
        return self._group.seconds_outside_engine() if self._group else {}

    def seconds(self) -> float:
        own = time.process_time() - self._own_before
        after = self._read_group()
        return own + sum(seconds - self._before.get(pid, 0.0) for pid, seconds in after.items())
