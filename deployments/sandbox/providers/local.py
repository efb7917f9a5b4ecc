"""Sandboxes on this machine, each a bubblewrap of its own: `local`.

There are no images: a sandbox sees the programs of this machine, to read, and all other files are its own, in memory of
a limited size. A folder's `Dockerfile` is carried out over that, in the part of its language that `dockerfile.py`
knows, and the files that came of it are kept as an image. Its network is empty but for a port that leads to the
service.

A sandbox ends with the process that created it, by the kernel: its first process (`programs/init.py`) ends when the
owner's end of their socket is closed. `reap` removes the images of dead owners, and processes of bubblewrap whose owner
died while they were starting: until it has the rights to, such a process does not end with its parent.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

from deployments.sandbox.interface import MIB, SandboxLost
from deployments.sandbox.isolation import NAMESPACES, SYSTEM_FOLDERS, folder_mounts, system_mounts
from deployments.sandbox.launch import NICENESS, HeldFds, default_interpreters
from deployments.sandbox.local import NoUserIdLeft, UserIdLease
from deployments.sandbox.programs import init
from deployments.sandbox.programs.relay import forward_connection
from deployments.sandbox.providers.dockerfile import BuildPlan, Copy, build_plan
from deployments.sandbox.providers.interface import (
    LARGEST_FILE_BYTES,
    LARGEST_OUTPUT_BYTES,
    OWNER_LABEL,
    ExecResult,
    ExecTimedOut,
    OutOfMemory,
    ProviderUnusable,
    RunningSandbox,
    SandboxFile,
    SandboxProvider,
    SandboxRefused,
    SandboxSpec,
    is_dead,
    owner_of_process,
    tar_of,
)
from deployments.sandbox.supervisor import RunUsage
from deployments.sandbox.system_calls import FilterOptions, system_call_filter

PORT = 8000
INIT = "/run/rollout/init.py"
IMAGES_PREFIX = "rollout-sandbox-images-"
MOST_IMAGES = 64
DEFAULT_MEMORY_MB, DEFAULT_STORAGE_MB = 2048, 1024
MOST_PROCESSES, MOST_OPEN_FILES = 512, 4096
STARTS_WITHIN_S = 30.0
ENDS_WITHIN_S = 10.0
MEASURE_EVERY_S = 0.25
KILLED = 128 + signal.SIGKILL
ACCOUNTS = {
    "/etc/passwd": b"root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "/etc/group": b"root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": b"127.0.0.1 localhost sandbox\n",
}
FIRST_VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
logger = logging.getLogger("rollout_service.sandbox")


class LocalProvider(SandboxProvider):
    name = "local"
    has_network = False

    def __init__(self) -> None:
        """Checks that bubblewrap works. Raises `ProviderUnusable`."""
        if shutil.which("bwrap") is None:
            raise ProviderUnusable("the provider local needs bubblewrap: apt-get install bubblewrap.")
        self._filter = system_call_filter(FilterOptions())
        self._python = interpreter()
        self._images: OrderedDict[str, _Image] = OrderedDict()
        self._building: dict[str, asyncio.Lock] = {}
        self._running: weakref.WeakSet[LocalRunningSandbox] = weakref.WeakSet()
        self._owner = f"{OWNER_LABEL}={owner_of_process(os.getpid())}"
        self._folder = Path(tempfile.mkdtemp(prefix=f"{IMAGES_PREFIX}{owner_of_process(os.getpid())}-"))
        self._try()
        reap_dead_owners()

    async def create(self, spec: SandboxSpec) -> RunningSandbox:
        image = await self._image(spec)
        if spec.network:
            raise SandboxRefused("The provider local gives no network but the service: ask for none, or use docker.")
        sandbox = await self._started(spec, image.environment, spec.workdir or image.workdir)
        try:
            await sandbox.unpack(image.archive)
        except BaseException:
            await destroyed(sandbox)
            raise
        return sandbox

    async def reap(self) -> int:
        return await asyncio.to_thread(reap_dead_owners)

    def close(self) -> None:
        for sandbox in list(self._running):
            sandbox.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _image(self, spec: SandboxSpec) -> "_Image":
        if spec.image is not None:
            if spec.image not in self._images:
                raise SandboxRefused(
                    f"The provider local has no image {spec.image!r}: it knows folders with a Dockerfile, and its own "
                    "snapshots. Use a provider that has images, such as docker."
                )
            return self._images[spec.image]
        assert spec.folder is not None
        plan = await asyncio.to_thread(build_plan, spec.folder)
        key = key_of(plan, spec)
        async with self._building.setdefault(key, asyncio.Lock()):
            if key not in self._images:
                try:
                    async with asyncio.timeout(spec.build_timeout_s):
                        await self._build(key, plan, spec)
                except TimeoutError as error:
                    limit = f"build_timeout_s of {spec.build_timeout_s:g} s"
                    raise SandboxRefused(f"{spec.folder} was not built within its {limit}.") from error
            self._images.move_to_end(key)
            return self._images[key]

    async def _build(self, key: str, plan: BuildPlan, spec: SandboxSpec) -> None:
        sandbox = await self._started(spec, {}, "/")
        try:
            for step in plan.steps:
                if isinstance(step, Copy):
                    await sandbox.write_files(step.files)
                    continue
                done = await sandbox.exec(step.argv, environment=step.environment, cwd=step.workdir)
                if done.exit_code == KILLED:
                    raise SandboxLost(f"{step.line} was killed.")
                if done.exit_code != 0:
                    said = (done.stderr.strip() or done.stdout.strip())[-500:]
                    raise SandboxRefused(
                        f"{step.line} of {spec.folder} ended with exit code {done.exit_code} over the programs of this "
                        f"machine, which are read-only in sandboxes without images: {said}"
                    )
            await self._keep(key, sandbox, plan.environment, plan.workdir)
        finally:
            await destroyed(sandbox)

    async def _keep(self, key: str, sandbox: "LocalRunningSandbox", variables: Mapping[str, str], workdir: str) -> None:
        archive = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.tar"
        await sandbox.pack(archive)
        self._images[key] = _Image(archive, variables, workdir)
        while len(self._images) > MOST_IMAGES:
            _, oldest = self._images.popitem(last=False)
            oldest.archive.unlink(missing_ok=True)

    async def keep_snapshot(self, sandbox: "LocalRunningSandbox") -> str:
        key = f"snapshot-{uuid4().hex}"
        await self._keep(key, sandbox, sandbox.variables, sandbox.workdir)
        return key

    async def _started(self, spec: SandboxSpec, variables: Mapping[str, str], workdir: str) -> "LocalRunningSandbox":
        sandbox = LocalRunningSandbox(self, spec, {**FIRST_VARIABLES, **variables, **spec.environment}, workdir)
        self._running.add(sandbox)
        try:
            await sandbox.start()
        except BaseException:
            await destroyed(sandbox)
            raise
        return sandbox

    def command(self, spec: SandboxSpec, uid: int | None, control_fd: int, status_fd: int, held: HeldFds) -> list[str]:
        """The command line of bubblewrap, up to the working directory of the commands."""
        storage = (spec.storage_mb or DEFAULT_STORAGE_MB) * MIB
        owner = [] if uid is None else ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        command = ["nice", "-n", str(NICENESS), *owner, "bwrap", *NAMESPACES, "--json-status-fd", str(status_fd)]
        command += ["--unshare-user", "--uid", "0", "--gid", "0", "--cap-drop", "ALL", "--as-pid-1"]
        if self._filter is not None:
            command += ["--seccomp", str(held.add(self._filter))]
        command += ["--size", str(storage), "--tmpfs", "/", "--proc", "/proc", "--dev", "/dev"]
        command += ["--perms", "1777", "--size", str(64 * MIB), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        command += ["--perms", "1777", "--dir", "/tmp", "--dir", "/var", "--perms", "1777", "--dir", "/var/tmp"]
        command += ["--perms", "0700", "--dir", "/root", *system_mounts()]
        outside_usr = [folder for folder in spec.read_only_folders if not Path(folder).is_relative_to("/usr")]
        command += folder_mounts([*self._python[1], *outside_usr])
        for path, content in {**ACCOUNTS, INIT: Path(init.__file__).read_bytes()}.items():
            command += ["--perms", "0644", "--file", str(held.add(content)), path]
        limits = [f"--nproc={MOST_PROCESSES}", f"--nofile={MOST_OPEN_FILES}", "--core=0", "--msgqueue=0"]
        for name, value in FIRST_VARIABLES.items():
            command += ["--setenv", name, value]
        return [
            *command,
            "prlimit",
            *limits,
            self._python[0],
            "-I",
            "-S",
            "-B",
            INIT,
            str(control_fd),
            str(PORT),
            self._owner,
        ]

    def read_only(self, spec: SandboxSpec) -> list[str]:
        """Paths which are no files of the sandbox's own."""
        return ["/proc", "/dev", "/run/rollout", *SYSTEM_FOLDERS, *self._python[1], *spec.read_only_folders, *ACCOUNTS]

    def _try(self) -> None:
        with HeldFds() as held, lease() as uid:
            spec = SandboxSpec(image="none")
            command = self.command(spec, uid, 0, 2, held)
            tried = subprocess.run(
                [*command[: command.index("prlimit")], "/usr/bin/env", "true"],
                check=False,
                capture_output=True,
                pass_fds=held.fds,
                timeout=STARTS_WITHIN_S,
                text=True,
            )
        if tried.returncode != 0:
            self.close()
            raise ProviderUnusable(
                f"the provider local: bubblewrap does not work on this machine: {tried.stderr.strip()}"
            )


class _Image:
    def __init__(self, archive: Path, environment: Mapping[str, str], workdir: str) -> None:
        self.archive = archive
        self.environment = environment
        self.workdir = workdir


class LocalRunningSandbox(RunningSandbox):
    """See `RunningSandbox`. `LocalProvider` makes it."""

    def __init__(self, provider: LocalProvider, spec: SandboxSpec, variables: Mapping[str, str], workdir: str) -> None:
        self._provider = provider
        self._spec = spec
        self.variables = variables
        self.workdir = workdir
        self._id = uuid4().hex
        self._base_url: str | None = None
        self._problem: Exception | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._first_pidfd: int | None = None
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
        try:
            uid = self._closing.enter_context(lease())
        except NoUserIdLeft as error:
            raise SandboxLost(str(error)) from error
        status_fd, status_of_process = os.pipe2(os.O_CLOEXEC)
        self._closing.callback(os.close, status_fd)
        self._ready: asyncio.Future[int] = loop.create_future()
        stderr = os.memfd_create("sandbox", os.MFD_CLOEXEC)
        self._closing.callback(os.close, stderr)
        try:
            with HeldFds() as held, self._control_inside as control:
                command = self._provider.command(self._spec, uid, control.fileno(), status_of_process, held)
                # By the thread of the event loop: the sandbox ends with the thread that started it.
                self._process = subprocess.Popen(  # noqa: ASYNC220
                    [*command, self.workdir],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env={"PATH": os.environ.get("PATH", os.defpath)},
                    pass_fds=(*held.fds, control.fileno(), status_of_process),
                    start_new_session=True,
                )
        except OSError as error:
            raise SandboxLost(f"The sandbox's process was not started: {error}.") from error
        finally:
            os.close(status_of_process)
        loop.add_reader(self._control, self._received)
        try:
            async with asyncio.timeout(STARTS_WITHIN_S):
                proc = await self._ready
        except TimeoutError as error:
            raise SandboxLost(f"The sandbox did not start within {STARTS_WITHIN_S:g} s.") from error
        except SandboxLost as error:
            os.lseek(stderr, 0, os.SEEK_SET)
            raise SandboxLost(f"{error} {os.read(stderr, 2000).decode(errors='replace').strip()}".strip()) from error
        self._first_pidfd = os.pidfd_open(first_pid_in(status_fd))
        self._closing.callback(os.close, self._first_pidfd)
        self._usage = RunUsage(0, proc)
        self._closing.callback(self._usage.close)
        self._keep(self._measure())

    def _keep(self, work: "asyncio.Future[None] | object") -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]
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
            self._keep(self._connected(socket.socket(fileno=fds[0])))
        elif not kind:
            self._end(SandboxLost("The sandbox has ended."))

    async def _connected(self, connection: socket.socket) -> None:
        """Carries a connection of the sandbox to the service."""
        if self._base_url is None:
            connection.close()
            return
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection)
        await forward_connection(reader, writer, self._base_url)

    async def _measure(self) -> None:
        memory = (self._spec.memory_mb or DEFAULT_MEMORY_MB) * MIB
        while self._problem is None:
            await asyncio.sleep(MEASURE_EVERY_S)
            used = self._usage.read()
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
        try:
            async with asyncio.timeout(timeout_s), self._asked(b"exec", request) as (reader, writer):
                writer.write(stdin)
                await writer.drain()
                while (frame := await read_frame(reader))[0] != b"x":
                    kept = output[frame[0]]
                    kept += frame[1]
                    del kept[:-LARGEST_OUTPUT_BYTES]
        except TimeoutError as error:
            raise ExecTimedOut(f"The command was ended after {timeout_s:g} s.") from error
        stdout, stderr = (kept.decode(errors="replace") for kept in output.values())
        return ExecResult(json.loads(frame[1])["exit_code"], stdout, stderr)

    async def write_files(self, files: Mapping[str, SandboxFile]) -> None:
        """See `RunningSandbox.write_files`."""
        await self._write(tar_of(files), "The files")

    async def unpack(self, archive: Path) -> None:
        """Unpacks what `pack` wrote."""
        await self._write(await asyncio.to_thread(archive.read_bytes), "The image")

    async def _write(self, archive: bytes, what: str) -> None:
        async with self._asked(b"write", None) as (reader, writer):
            writer.write(archive)
            writer.write_eof()
            _, answer = await read_frame(reader)
        if problem := json.loads(answer).get("error"):
            raise SandboxRefused(f"{what} cannot be written in the sandbox: {problem}.")

    async def read_file(self, path: str) -> bytes | None:
        """See `RunningSandbox.read_file`."""
        content = b""
        async with self._asked(b"read", {"path": path, "most_bytes": LARGEST_FILE_BYTES}) as (reader, _):
            while (frame := await read_frame(reader))[0] != b"x":
                content += frame[1]
        answer = json.loads(frame[1])
        if problem := answer.get("error"):
            raise SandboxRefused(f"{path} cannot be read: {problem}.")
        return None if answer.get("missing") else content

    async def pack(self, archive: Path) -> None:
        """Writes the files of the sandbox's own to a tar archive."""
        async with self._asked(b"pack", self._provider.read_only(self._spec)) as (reader, _):
            with archive.open("wb") as file:
                while (frame := await read_frame(reader))[0] != b"x":
                    file.write(frame[1])
        if problem := json.loads(frame[1]).get("error"):
            raise SandboxRefused(f"The files of the sandbox cannot be kept: {problem}.")

    async def snapshot(self) -> str:
        """See `RunningSandbox.snapshot`."""
        return await self._provider.keep_snapshot(self)

    async def reach(self, base_url: str) -> str:
        """See `RunningSandbox.reach`."""
        self._base_url = base_url
        return f"http://127.0.0.1:{PORT}{urlsplit(base_url).path}"

    async def destroy(self) -> None:
        """See `RunningSandbox.destroy`."""
        self._end(SandboxLost("The sandbox was destroyed."))
        for task in list(self._tasks):
            task.cancel()
        self.kill()
        if (process := self._process) is not None:
            await asyncio.to_thread(wait_for_end, process, self._first_pidfd)
        self._process = self._first_pidfd = None
        self._closing.close()

    def kill(self) -> None:
        """Ends all processes, which is the end of the files too."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        if self._first_pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first_pidfd, signal.SIGKILL)
        elif self._process is not None:
            self._process.kill()


def reap_dead_owners() -> int:
    """Ends the processes and removes the images of dead owners, and returns how many of both there were."""
    folders = [path for path in Path(tempfile.gettempdir()).glob(f"{IMAGES_PREFIX}*") if is_dead(owner_in(path))]
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)
    processes = [pid for pid, owner in owners_of_processes() if is_dead(owner)]
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(folders) + len(processes)


def owners_of_processes() -> Iterator[tuple[int, str]]:
    """The processes that have the label of an owner as an argument: those that make a sandbox, and its first one."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                for argument in (folder / "cmdline").read_bytes().split(b"\0"):
                    if argument.startswith(f"{OWNER_LABEL}=".encode()):
                        yield int(folder.name), argument.decode().partition("=")[2]


async def destroyed(sandbox: LocalRunningSandbox) -> None:
    """Destroys it to the end, also while the caller is cancelled."""
    await asyncio.shield(asyncio.ensure_future(sandbox.destroy()))


async def read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readexactly(5)
    return head[:1], await reader.readexactly(struct.unpack("<I", head[1:])[0])


def wait_for_end(process: subprocess.Popen[bytes], first_pidfd: int | None) -> None:
    """Waits for bubblewrap and for the first process of the sandbox, with which all others end."""
    try:
        process.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if first_pidfd is not None:
        poll = select.poll()
        poll.register(first_pidfd, select.POLLIN)
        if not poll.poll(ENDS_WITHIN_S * 1000):
            logger.error("The processes of a sandbox did not end within %g s.", ENDS_WITHIN_S)


def first_pid_in(status_fd: int) -> int:
    """The id of the first process, from the first line that bubblewrap has written."""
    return int(json.loads(os.read(status_fd, 4096).splitlines()[0])["child-pid"])


@contextlib.contextmanager
def lease():  # type: ignore[no-untyped-def]
    """A user id that no other process has, if this one may give it; None otherwise. Raises `NoUserIdLeft`."""
    if os.geteuid() != 0:
        yield None
        return
    leased = UserIdLease()
    try:
        yield leased.uid
    finally:
        leased.close()


def interpreter() -> tuple[str, list[str]]:
    """The Python of first processes, and its folders outside of the system's. Raises `ProviderUnusable`."""
    for known in reversed(default_interpreters(())):
        if known.executable.startswith("/usr/") or os.geteuid() != 0:
            return known.executable, known.folders
    raise ProviderUnusable("the provider local needs a Python below /usr: apt-get install python3.")


def key_of(plan: BuildPlan, spec: SandboxSpec) -> str:
    """The name of the image that the plan makes."""
    digest = hashlib.sha256(repr((plan.steps, plan.environment, plan.workdir, spec.read_only_folders)).encode())
    return digest.hexdigest()


def owner_in(path: Path) -> str:
    """The owner of a folder of images, which its name has."""
    return "-".join(path.name.removeprefix(IMAGES_PREFIX).split("-")[:2])
