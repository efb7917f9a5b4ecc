"""The processes of one launch: started, measured together and ended whole; and a run of a program to its end.

Guarantees: when `ProcessTree.end` or `run_to_end` returns or raises, no process of the launch is left; no more than the
permitted output of a program is held at any time. What all processes use is measured through the process file system of
their own namespace.
"""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from deployments.sandbox.interface import EndedBy, Limits, Outcome, SandboxLost
from deployments.sandbox.launch import HeldFds, Launch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_USER_TIME, _CHILDREN_SYSTEM_TIME, _RESIDENT_PAGES = 11, 14, 21
"""Places in `/proc/<pid>/stat` behind the name of the program, which may hold anything."""
_CHUNK_BYTES = 65536
_END_WITHIN_S = 20.0
"""Time in which the kernel ends all processes of a launch."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of all processes of a launch together."""

    memory_bytes: int
    """Resident pages; shared pages are counted once per process."""
    processor_time_s: float
    """Also of the processes that have ended."""


class ProcessTree:
    """The processes of one launch, all of which end with the first one behind its walls.

    `status_fd` is the descriptor for which the launch is made (see `Launch`). `start`, `end` and `close` follow one
    another; `kill` may be called at any time.
    """

    def __init__(self) -> None:
        self._closing = ExitStack()
        self._status_read, self.status_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._status_read, False)
        self._closing.callback(os.close, self._status_read)
        self._unstarted = ExitStack()
        self._unstarted.callback(os.close, self.status_fd)
        self._status = bytearray()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_signal = int(signal.SIGKILL)
        self._first_pidfd: int | None = None
        self._proc: int | None = None

    def start(self, launch: Launch, stdin: int, stdout: int, stderr: int) -> None:
        """Starts the launch by this thread, whose end would end it. Raises `SandboxLost`."""
        try:
            self._process = subprocess.Popen(
                launch.command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                pass_fds=(*launch.pass_fds, self.status_fd),
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxLost(f"The sandbox's process was not started: {error}.") from error
        finally:
            self._unstarted.close()
        self._stop_signal = launch.stop_signal
        self.launcher_fd = self._keep(os.pidfd_open(self._process.pid))
        """Can be read when the launched process has ended."""

    def measure_by(self, proc: int) -> None:
        """Measures by the launch's own `/proc`, which is closed at the end."""
        self._proc = self._keep(proc)

    def usage(self) -> Usage | None:
        """Current use, in microseconds a process; None if it cannot be read: not begun, ended, or forbidden."""
        self._read_status()
        try:
            if self._proc is None and (first_pid := self.reported("child-pid")) is not None:
                self._proc = self._opened_proc(first_pid)
            if self._proc is None:
                return None
            stats = [_stat_of(self._proc, name) for name in os.listdir(self._proc) if name.isdigit()]  # noqa: PTH208
        except OSError:
            return None
        running = [stat for stat in stats if stat is not None]
        ticks = sum(int(field) for stat in running for field in stat[_USER_TIME : _CHILDREN_SYSTEM_TIME + 1])
        return Usage(sum(int(stat[_RESIDENT_PAGES]) for stat in running) * _PAGE_BYTES, ticks / _TICKS_PER_S)

    def reported(self, name: str) -> int | None:
        """The value that the launched process has reported under this name."""
        for line in self._status.splitlines(keepends=True):
            if line.endswith(b"\n") and name in (status := json.loads(line)):
                return int(status[name])
        return None

    def kill(self) -> None:
        """Has all processes ended, without waiting for that."""
        if self._process is None:
            return
        if self._stop_signal == signal.SIGKILL and self._first_pidfd is not None:
            # The launcher ends with its child, which it waits for. Without it the ended child would stay in the process
            # table of a container whose first process does not wait for orphans, and count against its user's limit.
            with suppress(OSError):
                signal.pidfd_send_signal(self._first_pidfd, signal.SIGKILL)
        else:
            self._process.send_signal(self._stop_signal)

    async def end(self) -> None:
        """Ends all processes, and returns when they have ended. Idempotent.

        Raises:
            SandboxLost: the kernel did not end them in time.
        """
        if (process := self._process) is None:
            return
        try:
            async with asyncio.timeout(_END_WITHIN_S):
                # A launcher that is killed before it names the first process could leave that one behind.
                while self._read_status() and self._first_pidfd is None:
                    await readable(self._status_read)
                self.kill()
                await readable(self.launcher_fd)
                process.wait()
                self._read_status()
                if self._first_pidfd is not None:
                    await readable(self._first_pidfd)
        except TimeoutError as error:
            process.kill()
            raise SandboxLost(f"The processes of a sandbox did not end within {_END_WITHIN_S:g} s.") from error

    def close(self) -> None:
        """Closes the descriptors."""
        self._unstarted.close()
        self._process = self._first_pidfd = self._proc = None
        self._closing.close()

    def _keep(self, fd: int) -> int:
        self._closing.callback(os.close, fd)
        return fd

    def _read_status(self) -> bool:
        """Takes what the launched process has reported. Returns whether more may follow."""
        while True:
            try:
                chunk = os.read(self._status_read, _CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._status += chunk
            if self._first_pidfd is None and (first_pid := self.reported("child-pid")) is not None:
                with suppress(ProcessLookupError):
                    self._first_pidfd = self._keep(os.pidfd_open(first_pid))

    def _opened_proc(self, first_pid: int) -> int | None:
        """The launch's own `/proc`; None while it still sees that of the machine."""
        fd = os.open(f"/proc/{first_pid}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.readlink("self", dir_fd=fd)
        except FileNotFoundError:
            # This process is not in the namespace to which the directory belongs.
            return self._keep(fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None


def _stat_of(proc: int, pid: str) -> list[str] | None:
    """The fields of a process from its state on; None if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        fd = os.open(f"{pid}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            return os.read(fd, 4096).decode(errors="replace").rpartition(")")[2].split()
        finally:
            os.close(fd)
    return None


async def readable(fd: int) -> None:
    """Returns when the descriptor can be read."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


_MEASURE_EVERY_S = 0.05
_SIGXCPU_EXIT, _SIGKILL_EXIT = 128 + signal.SIGXCPU, 128 + signal.SIGKILL


class _Output:
    """A pipe for one stream of a program, cut at a limit while it is read."""

    def __init__(self, closing: ExitStack, limit: int) -> None:
        self.reading, self.writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reading, False)
        closing.callback(os.close, self.reading)
        closing.callback(os.close, self.writing)
        self.limit = limit
        self.content = bytearray()
        self.exceeded = False

    def read(self) -> bool:
        """Takes what is there, a chunk at most. Returns whether there was anything."""
        try:
            chunk = os.read(self.reading, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        room = self.limit - len(self.content)
        self.exceeded = self.exceeded or len(chunk) > room
        self.content += chunk[:room]
        return True

    def text(self) -> str:
        return self.content.decode(errors="replace")


async def run_to_end(tree: ProcessTree, launch: Launch, stdin: bytes, limits: Limits) -> Outcome:
    """Runs the launch of a program within its limits. Cancelling the call ends it.

    Raises:
        SandboxLost: the program was not started, or its processes did not end.
    """
    loop = asyncio.get_running_loop()
    with ExitStack() as closing, HeldFds() as held:
        stdout, stderr = (_Output(closing, limits.output_bytes) for _ in range(2))
        started_at = loop.time()
        tree.start(launch, held.add(stdin), stdout.writing, stderr.writing)
        used_s = 0.0

        def measured_limit() -> EndedBy | None:
            nonlocal used_s
            if (usage := tree.usage()) is None:
                return None
            used_s = usage.processor_time_s
            if usage.memory_bytes > limits.memory_bytes:
                return "memory"
            return "processor_time" if used_s >= limits.processor_time_s else None

        try:
            ended_by = await _ended_by(tree, (stdout, stderr), measured_limit, started_at + limits.time_s)
        finally:
            await tree.end()
        wall_s = loop.time() - started_at
        for output in (stdout, stderr):
            while not output.exceeded and output.read():
                pass
    exit_code = tree.reported("exit-code")
    if ended_by == "exit" and exit_code is None:
        raise SandboxLost(f"The sandbox did not start the program: {stderr.text().strip()[-500:]}")
    used_all = max(used_s, (tree.reported("processor-ms") or 0) / 1000) >= limits.processor_time_s
    if ended_by == "exit" and (exit_code == _SIGXCPU_EXIT or (exit_code == _SIGKILL_EXIT and used_all)):
        ended_by = "processor_time"
    if stdout.exceeded or stderr.exceeded:
        ended_by = "output"
    return Outcome(ended_by, exit_code if ended_by == "exit" else None, stdout.text(), stderr.text(), wall_s)


async def _ended_by(
    tree: ProcessTree, outputs: Sequence[_Output], measured_limit: Callable[[], EndedBy | None], deadline: float
) -> EndedBy:
    """Reads outputs and measures until the run ends or reaches a limit."""
    loop, happened = asyncio.get_running_loop(), asyncio.Event()

    def read(output: _Output) -> None:
        output.read()
        if output.exceeded:
            happened.set()

    for output in outputs:
        loop.add_reader(output.reading, read, output)
    loop.add_reader(tree.launcher_fd, happened.set)
    try:
        while (now := loop.time()) < deadline:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_MEASURE_EVERY_S, deadline - now)):
                    await happened.wait()
                    return "output" if any(output.exceeded for output in outputs) else "exit"
            if (reached := measured_limit()) is not None:
                return reached
        return "time"
    finally:
        for fd in (tree.launcher_fd, *(output.reading for output in outputs)):
            loop.remove_reader(fd)
