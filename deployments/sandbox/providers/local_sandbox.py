"""One sandbox of the provider `local`: starts it, asks its first process (`programs/init.py`), measures and ends it."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from deployments.sandbox.bubblewrap import SYSTEM_FOLDERS, bubblewrap_launch
from deployments.sandbox.interface import MIB, SandboxLost
from deployments.sandbox.launch import Launch, default_interpreters, held_file, leased_uid
from deployments.sandbox.programs import init
from deployments.sandbox.providers.interface import (
    DEFAULT_MEMORY_MB,
    KILLED,
    LARGEST_OUTPUT_BYTES,
    MOST_PROCESSES,
    OWNER_LABEL,
    ExecResult,
    OutOfMemory,
    ProviderUnusable,
    SandboxFile,
    SandboxSpec,
    tar_of,
)
from deployments.sandbox.providers.shell import ShellSandbox
from deployments.sandbox.supervisor import PipeOutput, ProcessTree, readable
from deployments.workers.cleanup import owner_of

MEASURE_EVERY_S = 0.25
PORT = 8000
"""The port of the sandbox's own loopback that leads to the service."""
STARTS_WITHIN_S = 30.0
FIRST_VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
_INIT = "/run/rollout/init.py"
_DEFAULT_STORAGE_MB = 1024
_MOST_OPEN_FILES = 4096
_ACCOUNTS = {
    "/etc/passwd": b"root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "/etc/group": b"root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": b"127.0.0.1 localhost sandbox\n",
}
logger = logging.getLogger("rollout_service.sandbox")


class LocalRunningSandbox(ShellSandbox):
    """See `RunningSandbox`. `LocalProvider` makes it."""

    def __init__(
        self,
        pinned: Sequence[str],
        spec: SandboxSpec,
        variables: Mapping[str, str],
        workdir: str,
        keep: "Callable[[LocalRunningSandbox], Awaitable[str]]",
    ) -> None:
        """Starts nothing yet.

        Args:
            pinned: the beginning of the command that starts it, see `LocalProvider`.
            variables: of all commands, those of its image and of `spec`.
            keep: makes a snapshot.
        """
        self._pinned = pinned
        self._spec = spec
        self.variables = variables
        self.workdir = workdir
        self._keep = keep
        self._id = uuid4().hex
        self._base_url: str | None = None
        self._problem: Exception | None = None
        self._tree = ProcessTree()
        self._ending: asyncio.Future[None] | None = None
        self._control, self._control_inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._closing = contextlib.ExitStack()
        self._closing.callback(self._control.close)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def id(self) -> str:
        return self._id

    async def start(self) -> None:
        """Raises `SandboxLost` or `SandboxRefused`."""
        loop = asyncio.get_running_loop()
        uid = self._closing.enter_context(leased_uid())
        self._ready: asyncio.Future[int] = loop.create_future()
        stderr = os.memfd_create("sandbox", os.MFD_CLOEXEC)
        self._closing.callback(os.close, stderr)
        with contextlib.ExitStack() as held, self._control_inside as control:
            inside, status = control.fileno(), self._tree.status_fd
            launch = sandbox_launch(self._spec, uid, inside, status, self.workdir, held)
            launch = replace(launch, command=[*self._pinned, *launch.command], pass_fds=(*launch.pass_fds, inside))
            # By the thread of the event loop: the sandbox ends with the thread that started it.
            self._tree.start(launch, subprocess.DEVNULL, subprocess.DEVNULL, stderr)
        loop.add_reader(self._control, self._received)
        try:
            async with asyncio.timeout(STARTS_WITHIN_S):
                self._tree.measure_by(await self._ready)
        except TimeoutError as error:
            raise SandboxLost(f"The sandbox did not start within {STARTS_WITHIN_S:g} s.") from error
        except SandboxLost as error:
            os.lseek(stderr, 0, os.SEEK_SET)
            raise SandboxLost(f"{error} {os.read(stderr, 2000).decode(errors='replace').strip()}".strip()) from error
        self._begin(self._measure())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _received(self) -> None:
        """Takes one packet of the sandbox, or its end."""
        try:
            kind, fds, _, _ = socket.recv_fds(self._control, 64, 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            kind, fds = b"", []
        if kind == b"ready" and not self._ready.done():
            self._ready.set_result(fds[0])
        elif kind == b"conn" and fds:
            self._begin(self._connected(socket.socket(fileno=fds[0])))
        elif not kind:
            self._end(SandboxLost("The sandbox has ended."))

    async def _connected(self, connection: socket.socket) -> None:
        """Carries a connection of the sandbox to the service."""
        if self._base_url is None:
            connection.close()
            return
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection)
        await _forward_connection(reader, writer, self._base_url)

    async def _measure(self) -> None:
        memory = (self._spec.memory_mb or DEFAULT_MEMORY_MB) * MIB
        while self._problem is None:
            await asyncio.sleep(MEASURE_EVERY_S)
            if self._tree.usage()[0] > memory:
                self._end(OutOfMemory(f"The sandbox used more than its memory of {memory // MIB} MiB."))
                self.kill()

    def _end(self, problem: Exception) -> None:
        """Every call from now on raises the first problem."""
        if self._problem is None:
            self._problem = problem
            asyncio.get_running_loop().remove_reader(self._control)
            if not self._ready.done():
                self._ready.set_exception(problem)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """See `RunningSandbox.exec`."""
        variables = {**self.variables, **(environment or {})}
        with contextlib.ExitStack() as closing:
            stdout, stderr = (closing.enter_context(PipeOutput(LARGEST_OUTPUT_BYTES)) for _ in range(2))
            files = held_file(closing, stdin), stdout.fd, stderr.fd
            async with asyncio.timeout(timeout_s):
                code = await self._exit_code(argv, variables, cwd, *files)
        return ExecResult(code, stdout.text(), stderr.text())

    async def _exit_code(
        self, argv: Sequence[str], environment: Mapping[str, str], cwd: str | None, *files: int
    ) -> int:
        """Runs a command with its stdin, stdout and stderr to its end. Cancelling the call ends it."""
        if self._problem is not None:
            raise self._problem
        request = json.dumps({"argv": list(argv), "environment": environment, "cwd": cwd}).encode()
        ours, theirs = socket.socketpair()
        with ours, contextlib.ExitStack() as closing:
            with theirs:
                try:
                    socket.send_fds(self._control, [b"exec"], [held_file(closing, request), *files, theirs.fileno()])
                except OSError as error:
                    raise self._problem or SandboxLost(f"The sandbox does not answer: {error}.") from error
            await readable(ours.fileno())
            code = ours.recv(64)
        if not code:
            raise self._problem or SandboxLost("The sandbox ended during a command.")
        return int(code)

    async def run_shell(self, line: str, timeout_s: float | None) -> ExecResult:
        """See `ShellSandbox.run_shell`."""
        try:
            return await self.exec(["/bin/sh", "-c", line], environment=FIRST_VARIABLES, cwd="/", timeout_s=timeout_s)
        except TimeoutError as error:
            raise SandboxLost(f"The sandbox did not answer within {timeout_s:g} s.") from error

    async def write_files(self, files: Mapping[str, SandboxFile]) -> None:
        """See `RunningSandbox.write_files`."""
        archive = await asyncio.to_thread(tar_of, files)
        with contextlib.ExitStack() as closing:
            await self.unpack(held_file(closing, archive))

    async def unpack(self, archive: int) -> None:
        """Writes the files of an open tar archive, such as one that `pack` wrote."""
        await self._tar(["--extract", "--no-same-owner"], stdin=archive)

    async def pack(self, archive: int) -> None:
        """Writes the files of the sandbox's own to an open tar archive."""
        left_out = [f"--exclude=.{path}" for path in _read_only_paths(self._spec)]
        await self._tar(["--create", "--sparse", "--anchored", "--no-wildcards", *left_out, "."], stdout=archive)

    async def _tar(self, arguments: Sequence[str], stdin: int | None = None, stdout: int | None = None) -> None:
        """Runs the machine's `tar` in the root folder. Raises `SandboxRefused` if it fails."""
        argv = ["/bin/tar", "--directory=/", "--blocking-factor=512", "--file=-", *arguments]
        with contextlib.ExitStack() as closing:
            stderr = closing.enter_context(PipeOutput(LARGEST_OUTPUT_BYTES))
            given = held_file(closing, b"") if stdin is None else stdin
            taken = stderr.fd if stdout is None else stdout
            code = await self._exit_code(argv, FIRST_VARIABLES, "/", given, taken, stderr.fd)
        if code == KILLED:
            raise SandboxLost("The command that reads and writes files was killed.")
        self.refuse_unwritten(ExecResult(code, "", stderr.text()))

    async def snapshot(self) -> str:
        """See `RunningSandbox.snapshot`."""
        return await self._keep(self)

    async def reach(self, base_url: str) -> str:
        """See `RunningSandbox.reach`."""
        self._base_url = base_url
        return f"http://127.0.0.1:{PORT}{urlsplit(base_url).path}"

    async def close(self) -> None:
        """See `RunningSandbox.close`. It is carried out to the end also if the caller is cancelled."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._destroyed())
        await asyncio.shield(self._ending)

    async def _destroyed(self) -> None:
        self._end(SandboxLost("The sandbox was destroyed."))
        for task in list(self._tasks):
            task.cancel()
        self.kill()
        try:
            await self._tree.end()
        except SandboxLost as error:
            logger.error("%s", error)
        self._tree.close()
        self._closing.close()

    def kill(self) -> None:
        """Ends all processes, which is the end of the files too."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._tree.kill()


async def _forward_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, base_url: str) -> None:
    """Carries a connection that came out of a sandbox to the service at `base_url`, until both sides have ended."""
    address = urlsplit(base_url)
    try:
        service = await asyncio.open_connection(
            address.hostname, address.port, ssl=True if address.scheme == "https" else None
        )
    except OSError:
        writer.close()
        return
    await asyncio.gather(_forward_bytes(reader, service[1]), _forward_bytes(service[0], writer))


async def _forward_bytes(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Carries bytes until one side has ended."""
    try:
        while part := await source.read(65536):
            target.write(part)
            await target.drain()
    except OSError:
        pass
    finally:
        target.close()


def sandbox_launch(
    spec: SandboxSpec, uid: int | None, control_fd: int, status_fd: int, workdir: str, held: contextlib.ExitStack
) -> Launch:
    """The launch of a sandbox, whose first process is `programs/init.py`. Raises `ProviderUnusable`."""
    python, python_folders = _interpreter()
    owner = f"{OWNER_LABEL}={owner_of(os.getpid())}"
    storage = (spec.storage_mb or _DEFAULT_STORAGE_MB) * MIB
    limits = [f"--nproc={MOST_PROCESSES}", f"--nofile={_MOST_OPEN_FILES}", "--core=0", "--msgqueue=0"]
    init_argv = [python, "-I", "-S", "-B", _INIT, str(control_fd), str(PORT), owner, workdir]
    folders = [folder for folder in spec.read_only_folders if not Path(folder).is_relative_to("/usr")]
    return bubblewrap_launch(
        status_fd,
        held,
        outside=[] if uid is None else ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"],
        users=["--unshare-user", "--uid", "0", "--gid", "0", "--cap-drop", "ALL", "--as-pid-1"],
        mounts=[
            *("--size", str(storage), "--tmpfs", "/", "--perms", "1777", "--dir", "/tmp", "--dir", "/var"),
            *("--perms", "1777", "--dir", "/var/tmp", "--perms", "0700", "--dir", "/root"),
        ],
        shared_memory_bytes=64 * MIB,
        folders=[*python_folders, *folders],
        files={**_ACCOUNTS, _INIT: Path(init.__file__).read_bytes()},
        file_mode="0644",
        variables=FIRST_VARIABLES,
        inside=["prlimit", *limits, *init_argv],
    )


def _read_only_paths(spec: SandboxSpec) -> list[str]:
    """Paths which are no files of the sandbox's own."""
    return [
        *("/proc", "/dev", "/run/rollout", *SYSTEM_FOLDERS),
        *(*_interpreter()[1], *spec.read_only_folders, *_ACCOUNTS),
    ]


@cache
def _interpreter() -> tuple[str, list[str]]:
    """The Python of first processes, and its folders outside of the system's. Raises `ProviderUnusable`."""
    for known in reversed(default_interpreters(())):
        if known.executable.startswith("/usr/") or os.geteuid() != 0:
            return known.executable, known.folders
    raise ProviderUnusable("the provider local needs a Python below /usr: apt-get install python3.")
