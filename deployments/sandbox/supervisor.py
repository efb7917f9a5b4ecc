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
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

from deployments.sandbox.interface import EndedBy, Limits, Outcome, SandboxLost
from deployments.sandbox.launch import Launch, held_file

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_USER_TIME, _CHILDREN_SYSTEM_TIME, _RESIDENT_PAGES = 11, 14, 21
"""Places in `/proc/<pid>/stat` behind the name of the program, which may hold anything."""
_CHUNK_BYTES, _CHUNKS_OF_A_PIPE = 65536, 32
"""A pipe holds a MiB at most."""
_END_WITHIN_S = 20.0
"""Time in which the kernel ends all processes of a launch."""
_MEASURE_EVERY_S = 0.05
_SIGXCPU_EXIT, _SIGKILL_EXIT = 128 + signal.SIGXCPU, 128 + signal.SIGKILL


async def readable(fd: int) -> None:
    """Returns when the descriptor can be read."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


def start_process(argv: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Starts a process, which takes a few milliseconds. Raises `SandboxLost`.

    Not by the event loop: uvloop forks, and gRPC's fork handlers sometimes break the new process. Python's `subprocess`
    does not run them.
    """
    try:
        return subprocess.Popen(argv, **options)
    except OSError as error:
        raise SandboxLost(f"{argv[0]} was not started: {error}.") from error


async def ended(process: "subprocess.Popen[bytes]") -> int:
    """The exit code of a process, once it has ended, even if others still hold the files that it was given."""
    fd = os.pidfd_open(process.pid)
    try:
        await readable(fd)
    finally:
        os.close(fd)
    return process.wait()


class PipeOutput:
    """An output of a process: a pipe that the event loop reads within a `with` block, whose end takes what is left.

    Keeps its last bytes; with an event `exceeded`, its first ones, and sets the event when there are more.
    """

    def __init__(self, most_bytes: int, exceeded: asyncio.Event | None = None) -> None:
        self._most_bytes = most_bytes
        self._exceeded = exceeded
        self._kept = bytearray()

    def __enter__(self) -> Self:
        self._reading, self.fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)
        asyncio.get_running_loop().add_reader(self._reading, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._reading)
        # A process that goes on may write for ever.
        for _chunk in range(_CHUNKS_OF_A_PIPE):
            self._take()
        os.close(self._reading)
        os.close(self.fd)

    @property
    def is_exceeded(self) -> bool:
        return len(self._kept) > self._most_bytes

    def text(self) -> str:
        return self._kept[: self._most_bytes].decode(errors="replace")

    def _take(self) -> None:
        if self.is_exceeded:
            return
        with suppress(BlockingIOError):
            self._kept += os.read(self._reading, _CHUNK_BYTES)
        if self._exceeded is None:
            del self._kept[: -self._most_bytes]
        elif len(self._kept) > self._most_bytes:
            self._exceeded.set()
            asyncio.get_running_loop().remove_reader(self._reading)


class ProcessTree:
    """The processes of one launch, all of which end with the first one behind its walls.

    `status_fd` is the descriptor for which the launch is made (see `Launch`). `start`, `end` and `close` follow one
    another; `kill` may be called at any time.
    """

    def __init__(self) -> None:
        self._closing, self._unstarted = ExitStack(), ExitStack()
        self._status_read, self.status_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._status_read, False)
        self._closing.callback(os.close, self._status_read)
        self._unstarted.callback(os.close, self.status_fd)
        self._status = bytearray()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_signal = int(signal.SIGKILL)
        self._first_pidfd: int | None = None
        self._proc: int | None = None

    def start(self, launch: Launch, stdin: int, stdout: int, stderr: int) -> None:
        """Starts the launch by this thread, whose end would end it. Raises `SandboxLost`."""
        try:
            self._process = start_process(
                launch.command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                pass_fds=(*launch.pass_fds, self.status_fd),
                start_new_session=True,
            )
        finally:
            self._unstarted.close()
        self._stop_signal = launch.stop_signal
        self.launcher_fd = self._keep(os.pidfd_open(self._process.pid))
        """Can be read when the launched process has ended."""

    def measure_by(self, proc: int) -> None:
        """Measures by the launch's own `/proc`, which is closed at the end."""
        self._proc = self._keep(proc)

    def usage(self) -> tuple[int, float]:
        """Memory in bytes and processor time in seconds of all processes, also of those that have ended.

        Pages that processes share are counted once per process. Both are 0 where they cannot be read: before the
        beginning, after the end, or forbidden. Takes microseconds a process.
        """
        self._read_status()
        try:
            if self._proc is None and (first_pid := self.reported("child-pid")) is not None:
                self._proc = self._opened_proc(first_pid)
            if self._proc is None:
                return 0, 0.0
            stats = [_stat_of(self._proc, name) for name in os.listdir(self._proc) if name.isdigit()]  # noqa: PTH208
        except OSError:
            return 0, 0.0
        running = [stat for stat in stats if stat is not None]
        ticks = sum(int(field) for stat in running for field in stat[_USER_TIME : _CHILDREN_SYSTEM_TIME + 1])
        return sum(int(stat[_RESIDENT_PAGES]) for stat in running) * _PAGE_BYTES, ticks / _TICKS_PER_S

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


async def run_to_end(tree: ProcessTree, launch: Launch, stdin: bytes, limits: Limits) -> Outcome:
    """Runs the launch of a program within its limits. Cancelling the call ends it.

    Raises:
        SandboxLost: the program was not started, or its processes did not end.
    """
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    with ExitStack() as closing:
        stdout, stderr = (closing.enter_context(PipeOutput(limits.output_bytes, over)) for _ in range(2))
        started_at = loop.time()
        tree.start(launch, held_file(closing, stdin), stdout.fd, stderr.fd)
        try:
            ended_by, used_s = await _ended_by(tree, over, limits, started_at + limits.time_s)
        finally:
            await tree.end()
        wall_s = loop.time() - started_at
    exit_code = tree.reported("exit-code")
    if stdout.is_exceeded or stderr.is_exceeded:
        ended_by = "output"
    if ended_by == "exit" and exit_code is None:
        raise SandboxLost(f"The sandbox did not start the program: {stderr.text().strip()[-500:]}")
    used_all = max(used_s, (tree.reported("processor-ms") or 0) / 1000) >= limits.processor_time_s
    if ended_by == "exit" and (exit_code == _SIGXCPU_EXIT or (exit_code == _SIGKILL_EXIT and used_all)):
        ended_by = "processor_time"
    return Outcome(ended_by, exit_code if ended_by == "exit" else None, stdout.text(), stderr.text(), wall_s)


async def _ended_by(tree: ProcessTree, over: asyncio.Event, limits: Limits, deadline: float) -> tuple[EndedBy, float]:
    """Measures until the run has ended, `over` is set, or a limit is reached; also the processor time that was used."""
    loop, used_s = asyncio.get_running_loop(), 0.0
    loop.add_reader(tree.launcher_fd, over.set)
    try:
        while (now := loop.time()) < deadline:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_MEASURE_EVERY_S, deadline - now)):
                    await over.wait()
                    return "exit", used_s
            memory_bytes, measured_s = tree.usage()
            used_s = max(used_s, measured_s)
            if memory_bytes > limits.memory_bytes:
                return "memory", used_s
            if used_s >= limits.processor_time_s:
                return "processor_time", used_s
        return "time", used_s
    finally:
        loop.remove_reader(tree.launcher_fd)
