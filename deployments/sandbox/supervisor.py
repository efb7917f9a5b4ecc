"""Runs one prepared process to its end, within its limits. Blocks; `LocalSandbox` calls it in a thread.

Guarantees: when `Supervisor.run` returns or raises, no process of the run is left; no more than the permitted output is
held at any time; a run that is cancelled ends at once. What all processes of a run use is measured through the process
file system of its own namespace.
"""

import json
import os
import select
import selectors
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from deployments.sandbox.interface import EndedBy, Limits, Outcome, SandboxLost
from deployments.sandbox.launch import HeldFds, Launch

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
USER_TIME, CHILDREN_SYSTEM_TIME, RESIDENT_PAGES = 11, 14, 21
"""Places in `/proc/<pid>/stat` behind the name of the program, which may hold anything."""


@dataclass(frozen=True, slots=True)
class Usage:
    memory_bytes: int
    """Resident pages; those that processes share count for each."""
    processor_time_s: float
    """Also of the processes that have ended."""


class RunUsage:
    """Measures one run by its first process, whose namespace holds all others. Costs microseconds a process.

    Args:
        proc: the run's own `/proc`, if it was opened already; closed by `close`.
    """

    def __init__(self, first_pid: int, proc: int | None = None) -> None:
        self._first_pid = first_pid
        self._proc = proc

    def read(self) -> Usage | None:
        """Current usage of the run; None if it cannot be read: not begun, ended, or forbidden."""
        try:
            if self._proc is None:
                self._proc = opened_proc(self._first_pid)
            if self._proc is None:
                return None
            stats = [read_stat(self._proc, name) for name in os.listdir(self._proc) if name.isdigit()]  # noqa: PTH208
        except OSError:
            return None
        running = [stat for stat in stats if stat is not None]
        ticks = sum(int(field) for stat in running for field in stat[USER_TIME : CHILDREN_SYSTEM_TIME + 1])
        return Usage(sum(int(stat[RESIDENT_PAGES]) for stat in running) * PAGE_BYTES, ticks / TICKS_PER_S)

    def close(self) -> None:
        if self._proc is not None:
            os.close(self._proc)
            self._proc = None


def opened_proc(first_pid: int) -> int | None:
    """The run's own `/proc`; None while the run still sees that of the machine."""
    fd = os.open(f"/proc/{first_pid}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.readlink("self", dir_fd=fd)
    except FileNotFoundError:
        # This process is not in the namespace to which the directory belongs.
        return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def read_stat(proc: int, pid: str) -> list[str] | None:
    """The fields of a process from its state on; None if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        fd = os.open(f"{pid}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            return os.read(fd, 4096).decode(errors="replace").rpartition(")")[2].split()
        finally:
            os.close(fd)
    return None


MEASURE_EVERY_S = 0.05
CHUNK_BYTES = 65536
END_WITHIN_S = 20.0
"""Time in which the kernel ends all processes of a run."""
SIGXCPU_EXIT = 128 + signal.SIGXCPU
SIGKILL_EXIT = 128 + signal.SIGKILL


class RunCancelled(Exception):
    """Nobody waits for the run any longer."""


class Cancellation:
    """Ends a run from another thread. Has no effect on a run that has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def cancel(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        """Readable once the run is cancelled."""
        assert self._fd is not None
        return self._fd

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


@dataclass(slots=True)
class Output:
    """One stream of the program, cut at a limit while it is read."""

    fd: int
    limit: int
    content: bytearray = field(default_factory=bytearray)
    at_end: bool = False
    exceeded: bool = False

    def read(self) -> None:
        """Takes what is there, a chunk at most."""
        try:
            chunk = os.read(self.fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        self.at_end = not chunk
        room = self.limit - len(self.content)
        self.exceeded = self.exceeded or len(chunk) > room
        self.content += chunk[:room]

    def drain(self) -> None:
        """Takes what the ended program had written, up to the limit."""
        before = -1
        while not (self.at_end or self.exceeded) and len(self.content) != before:
            before = len(self.content)
            self.read()

    def text(self) -> str:
        return self.content.decode(errors="replace")


class Supervisor:
    """One run."""

    def __init__(self, limits: Limits, cancellation: Cancellation) -> None:
        self._limits = limits
        self._cancellation = cancellation
        self._opened: set[int] = set()
        self._status = bytearray()
        self._first_pidfd: int | None = None
        self._usage: RunUsage | None = None
        self._processor_time_s = 0.0
        self._status_fd, self.status_fd_of_launch = self._pipe()
        """The second one is for `Isolation.launch`."""

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in list(self._opened):
            self._close(fd)
        if self._usage is not None:
            self._usage.close()

    def _pipe(self) -> tuple[int, int]:
        """A pipe whose reading end does not block."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        self._opened |= {reading, writing}
        return reading, writing

    def _close(self, fd: int) -> None:
        self._opened.remove(fd)
        os.close(fd)

    def run(self, launch: Launch, stdin: bytes) -> Outcome:
        """Raises `RunCancelled`, or `SandboxLost` if the program cannot be started, or its processes not ended."""
        started = time.monotonic()
        out, out_of_program = self._pipe()
        err, err_of_program = self._pipe()
        self._stdout = Output(out, self._limits.output_bytes)
        self._stderr = Output(err, self._limits.output_bytes)
        with HeldFds() as held:
            try:
                process = subprocess.Popen(
                    launch.command,
                    stdin=held.add(stdin),
                    stdout=out_of_program,
                    stderr=err_of_program,
                    env=launch.environment,
                    pass_fds=(*launch.pass_fds, self.status_fd_of_launch),
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxLost(f"The sandbox's process was not started: {error}.") from error
        for fd in (out_of_program, err_of_program, self.status_fd_of_launch):
            self._close(fd)
        try:
            ended_by = self._wait(process, started + self._limits.time_s)
        finally:
            self._end(process, launch.stop_signal)
        return self._outcome(ended_by, time.monotonic() - started)

    def _outcome(self, ended_by: EndedBy, wall_s: float) -> Outcome:
        self._stdout.drain()
        self._stderr.drain()
        exit_code = self._reported("exit-code")
        if ended_by == "exit" and exit_code is None:
            raise SandboxLost(f"The sandbox did not start the program: {self._stderr.text().strip()[-500:]}")
        used_s = max(self._processor_time_s, (self._reported("processor-ms") or 0) / 1000)
        used_all = used_s >= self._limits.processor_time_s
        if ended_by == "exit" and (exit_code == SIGXCPU_EXIT or (exit_code == SIGKILL_EXIT and used_all)):
            ended_by = "processor_time"
        if self._stdout.exceeded or self._stderr.exceeded:
            ended_by = "output"
        if ended_by != "exit":
            exit_code = None
        return Outcome(ended_by, exit_code, self._stdout.text(), self._stderr.text(), wall_s)

    def _wait(self, process: subprocess.Popen[bytes], deadline: float) -> EndedBy:
        """Reads output and measures until the run ends or reaches a limit. Raises `RunCancelled`."""
        process_fd = os.pidfd_open(process.pid)
        self._opened.add(process_fd)
        with selectors.DefaultSelector() as selector:
            for source in (self._stdout, self._stderr):
                selector.register(source.fd, selectors.EVENT_READ, source)
            for fd in (process_fd, self._status_fd, self._cancellation.fileno()):
                selector.register(fd, selectors.EVENT_READ)
            measure_at = time.monotonic() + MEASURE_EVERY_S
            while True:
                now = time.monotonic()
                if now >= deadline:
                    return "time"
                ready = selector.select(max(min(deadline, measure_at) - now, 0.0))
                for key, _ in ready:
                    if key.fd == self._cancellation.fileno():
                        raise RunCancelled
                    if key.fd == self._status_fd:
                        if not self._read_status():
                            selector.unregister(key.fd)
                    elif key.data is not None:
                        key.data.read()
                        if key.data.exceeded:
                            return "output"
                        if key.data.at_end:
                            selector.unregister(key.fd)
                if any(key.fd == process_fd for key, _ in ready):
                    return "exit"
                if time.monotonic() >= measure_at:
                    if (reached := self._measured_limit()) is not None:
                        return reached
                    measure_at = time.monotonic() + MEASURE_EVERY_S

    def _measured_limit(self) -> EndedBy | None:
        """The limit that all processes of the run together have reached."""
        if self._usage is None or (usage := self._usage.read()) is None:
            return None
        self._processor_time_s = usage.processor_time_s
        if usage.memory_bytes > self._limits.memory_bytes:
            return "memory"
        return "processor_time" if usage.processor_time_s >= self._limits.processor_time_s else None

    def _read_status(self) -> bool:
        """Learns the first process of the run: when it has ended, all others have. Returns whether more may follow."""
        try:
            chunk = os.read(self._status_fd, CHUNK_BYTES)
        except BlockingIOError:
            return True
        self._status += chunk
        if self._usage is None and (first_pid := self._reported("child-pid")) is not None:
            self._usage = RunUsage(first_pid)
            with suppress(ProcessLookupError):
                self._first_pidfd = os.pidfd_open(first_pid)
                self._opened.add(self._first_pidfd)
        return bool(chunk)

    def _reported(self, name: str) -> int | None:
        """The value that the launched process has reported under this name."""
        for line in self._status.splitlines(keepends=True):
            if line.endswith(b"\n") and name in (status := json.loads(line)):
                return int(status[name])
        return None

    def _end(self, process: subprocess.Popen[bytes], stop_signal: int) -> None:
        """Ends all processes of the run and waits for that. Raises `SandboxLost` if the kernel does not end them."""
        # A launcher that is killed before it names the first process could leave that one behind.
        deadline = time.monotonic() + END_WITHIN_S
        while self._first_pidfd is None and readable(self._status_fd, deadline) and self._read_status():
            pass
        if stop_signal == signal.SIGKILL and self._first_pidfd is not None:
            # The launcher ends with its child, which it waits for. Without it the ended child would stay in the process
            # table of a container whose first process does not wait for orphans, and count against its user's limit.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first_pidfd, signal.SIGKILL)
        else:
            process.send_signal(stop_signal)
        try:
            process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise SandboxLost(f"The sandbox's process did not end within {END_WITHIN_S:g} s.") from error
        while readable(self._status_fd, time.monotonic()) and self._read_status():
            pass
        if self._first_pidfd is not None and not readable(self._first_pidfd, deadline):
            raise SandboxLost(f"The processes of a run did not end within {END_WITHIN_S:g} s.")


def readable(fd: int, deadline: float) -> bool:
    """Waits until the descriptor can be read, until `deadline` by the monotonic clock."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(deadline - time.monotonic(), 0.0) * 1000))
