"""A process and all its descendants: what they cost, and a way to let them rest."""

import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx
import psutil

ENGINE_TITLE = "VLLM::"
"""With this begin the titles that vLLM gives to the engine's processes."""
START_WITHIN_S = 600
POLL_S = 0.5
END_WITHIN_S = 60


class ProcessGroup:
    """Everything below and including one process, as it is at the moment of each call."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)

    def _all(self) -> list[psutil.Process]:
        return [self._root, *self._root.children(recursive=True)]

    def seconds_outside_engine(self) -> dict[int, float]:
        """Processor seconds so far (user and system) by pid, of all processes that are not the engine's own."""
        return {process.pid: seconds for process in self._all() if (seconds := cost_of(process)) is not None}

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


def cost_of(process: psutil.Process) -> float | None:
    """`None` for a process of the engine, or one that has ended."""
    try:
        with process.oneshot():
            if process.name().startswith(ENGINE_TITLE):
                return None
            times = process.cpu_times()
            return times.user + times.system
    except psutil.NoSuchProcess:
        return None


class ProcessorTime:
    """Between two readings: the processor seconds of this process's own work and a group's, outside the engine."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self._before = self._read()

    def _read(self) -> dict[int, float]:
        return {0: time.process_time(), **(self._group.seconds_outside_engine() if self._group else {})}

    def seconds(self) -> float:
        after = self._read()
        return sum(seconds - self._before.get(pid, 0.0) for pid, seconds in after.items())
