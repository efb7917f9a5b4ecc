"""A process and all its descendants: what they cost, and a way to let them rest."""

import signal
import time

import psutil

ENGINE_TITLE = "VLLM::"
"""With this begin the titles that vLLM gives to the engine's processes."""
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
