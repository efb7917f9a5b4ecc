"""One sandbox of the provider `local`: starts it, asks its first process (`programs/init.py`), measures and ends it."""

import asyncio
import contextlib
import io
import json
import logging
import os
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO
from urllib.parse import urlsplit
from uuid import uuid4

from deployments.sandbox.interface import MIB, SandboxLost
from deployments.sandbox.launch import HeldFds, leased_uid
from deployments.sandbox.providers.files import tar_of
from deployments.sandbox.providers.interface import (
    DEFAULT_MEMORY_MB,
    LARGEST_FILE_BYTES,
    LARGEST_OUTPUT_BYTES,
    ExecResult,
    ExecTimedOut,
    OutOfMemory,
    RunningSandbox,
    SandboxFile,
    SandboxRefused,
    SandboxSpec,
)
from deployments.sandbox.providers.local_walls import PORT, STARTS_WITHIN_S, read_only_paths, sandbox_launch
from deployments.sandbox.supervisor import ProcessTree

MEASURE_EVERY_S = 0.25
logger = logging.getLogger("rollout_service.sandbox")


class LocalRunningSandbox(RunningSandbox):
    """See `RunningSandbox`. `LocalProvider` makes it."""

    def __init__(
        self,
        pinned: Sequence[str],
        spec: SandboxSpec,
        variables: Mapping[str, str],
        workdir: str,
    ) -> None:
        """Starts nothing yet.

        Args:
            pinned: the beginning of the command that starts it, see `Processors`.
            variables: of all commands, those of its image and of `spec`.
        """
        self._pinned = pinned
        self._spec = spec
        self.variables = variables
        self.workdir = workdir
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
        with HeldFds() as held, self._control_inside as control:
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
            used = self._tree.usage()
            if used is not None and used.memory_bytes > memory:
                self._end(OutOfMemory(f"The sandbox used more than its memory of {memory // MIB} MiB."))
                self.kill()

    def _end(self, problem: Exception) -> None:
        """Every call from now on raises the first problem."""
        if self._problem is None:
            self._problem = problem
            asyncio.get_running_loop().remove_reader(self._control)
            if not self._ready.done():
                self._ready.set_exception(problem)

    @contextlib.asynccontextmanager
    async def _asked(
        self, kind: bytes, request: object
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A stream to the first process, which has the request. Its end is one of the command."""
        if self._problem is not None:
            raise self._problem
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                socket.send_fds(self._control, [kind], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise self._problem or SandboxLost(f"The sandbox does not answer: {error}.") from error
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            if request is not None:
                writer.write(json.dumps(request).encode() + b"\n")
            yield reader, writer
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise self._problem or SandboxLost("The sandbox ended during a command.") from error
        finally:
            writer.transport.abort()

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
        request = {
            "argv": list(argv),
            "environment": {**self.variables, **(environment or {})},
            "cwd": cwd,
            "stdin_bytes": len(stdin),
        }
        output = {b"o": bytearray(), b"e": bytearray()}

        def keep(stream: bytes, part: bytes) -> None:
            kept = output[stream]
            kept += part
            del kept[:-LARGEST_OUTPUT_BYTES]

        try:
            async with asyncio.timeout(timeout_s):
                ended = await self._answer(b"exec", request, keep, stdin)
        except TimeoutError as error:
            raise ExecTimedOut(f"The command was ended after {timeout_s:g} s.") from error
        stdout, stderr = (kept.decode(errors="replace") for kept in output.values())
        return ExecResult(ended["exit_code"], stdout, stderr)

    async def _answer(
        self, kind: bytes, request: object, take: Callable[[bytes, bytes], object], sent: bytes = b""
    ) -> dict[str, Any]:
        """The end of an answer. `take` gets the kind and the content of each frame before it."""
        async with self._asked(kind, request) as (reader, writer):
            writer.write(sent)
            await writer.drain()
            while (frame := await _read_frame(reader))[0] != b"x":
                take(*frame)
        ended: dict[str, Any] = json.loads(frame[1])
        return ended

    async def write_files(self, files: Mapping[str, SandboxFile]) -> None:
        """See `RunningSandbox.write_files`."""
        await self.unpack(io.BytesIO(await asyncio.to_thread(tar_of, files)))

    async def unpack(self, archive: BinaryIO) -> None:
        """Writes the files of a tar archive, such as one that `pack` wrote."""
        async with self._asked(b"write", None) as (reader, writer):
            while part := await asyncio.to_thread(archive.read, MIB):
                writer.write(part)
                await writer.drain()
            writer.write_eof()
            _, answer = await _read_frame(reader)
        if problem := json.loads(answer).get("error"):
            raise SandboxRefused(f"The files cannot be written in the sandbox: {problem}.")

    async def read_file(self, path: str) -> bytes | None:
        """See `RunningSandbox.read_file`."""
        content = bytearray()
        asked = {"path": path, "most_bytes": LARGEST_FILE_BYTES}
        ended = await self._answer(b"read", asked, lambda _, part: content.extend(part))
        if problem := ended.get("error"):
            raise SandboxRefused(f"{path} cannot be read: {problem}.")
        return None if ended.get("missing") else bytes(content)

    async def pack(self, archive: BinaryIO) -> None:
        """Writes the files of the sandbox's own to a tar archive."""
        left_out = read_only_paths(self._spec)
        ended = await self._answer(b"pack", left_out, lambda _, part: archive.write(part))
        archive.flush()
        if problem := ended.get("error"):
            raise SandboxRefused(f"The files of the sandbox cannot be kept: {problem}.")

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


async def _read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readexactly(5)
    return head[:1], await reader.readexactly(struct.unpack("<I", head[1:])[0])
