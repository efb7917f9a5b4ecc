"""Sandboxes of which a provider gives little more than a shell: commands, files and their ends by what a shell can do.

A module of such a provider adds three calls: run a line of shell, write files, destroy the sandbox. Each command writes
its process to a file before it begins, and reads its stdin from another one, because the provider cannot end it.

Where sandboxes outlive the process that created them, another one beside it, the reaper, destroys them. It reads from a
pipe whose other end its owner holds. When the pipe is closed, which is at the end of the owner, however that came, it
destroys all sandboxes with the owner's label. If both die at once, nothing destroys them.
"""

import asyncio
import base64
import json
import logging
import os
import shlex
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import (
    LARGEST_FILE_BYTES,
    LARGEST_OUTPUT_BYTES,
    ExecResult,
    OutOfMemory,
    RunningSandbox,
    SandboxFile,
    SandboxProvider,
    SandboxRefused,
    SandboxSpec,
    open_provider,
)

CALLS_OF_OURS_S = 120.0
PART_BYTES = 512 * 1024
_FOLDER = "/tmp/.rollout"
"""In sandboxes: files of commands."""
_MISSING, _NOT_A_FILE = 44, 45
_DONE = "part-is-read"
_REAPS, _REAP_EVERY_S = 30, 2.0
"""A sandbox whose creation was under way when its owner died appears a little later."""
_REAPER = f"import sys; from {__name__} import _reap; _reap(*sys.argv[1:])"
_REMOVING = AsyncRetrying(
    stop=stop_after_attempt(5), wait=wait_fixed(2.0), retry=retry_if_exception_type(SandboxLost), reraise=True
)
logger = logging.getLogger("rollout_service.sandbox")


class ShellSandbox(RunningSandbox):
    """A sandbox whose files are read by a shell in it."""

    @abstractmethod
    async def run_shell(self, line: str, timeout_s: float | None) -> ExecResult:
        """Runs a line by `sh -c`. `timeout_s` is a bound for the provider, above that of the command.

        Raises:
            SandboxLost: the sandbox is gone, or does not answer.
            OutOfMemory: it was destroyed for its memory.
        """

    async def read_file(self, path: str) -> bytes | None:
        """See `RunningSandbox.read_file`. Reads a part at a time, so that a file without an end is not held."""
        quoted, content = shlex.quote(path), bytearray()
        exists = f"test -e {quoted} || exit {_MISSING}; test -f {quoted} || exit {_NOT_A_FILE}"
        while True:
            tail, head = f"tail -c +{len(content) + 1} {quoted}", f"head -c {PART_BYTES}"
            # A shell knows the exit code of the last command alone.
            part = f"{{ {tail} && echo {_DONE} >&2; }} | {{ {head} && echo {_DONE} >&2; }} | base64"
            done = await self.run_shell(f"{exists}; {part}", CALLS_OF_OURS_S)
            if done.exit_code == _MISSING:
                return None
            # Some backends give both streams as stdout. No text of base64 has a hyphen.
            said = done.stdout + done.stderr
            try:
                read = base64.b64decode(done.stdout.replace(_DONE, ""))
            except ValueError as error:
                raise SandboxRefused(f"{path} cannot be read: base64 of the sandbox wrote something else.") from error
            content += read
            if done.exit_code == _NOT_A_FILE or len(content) > LARGEST_FILE_BYTES:
                raise self._unreadable(path)
            is_last = len(read) < PART_BYTES
            if done.exit_code != 0 or (is_last and said.count(_DONE) != 2):
                raise SandboxRefused(f"{path} cannot be read: {done.stderr.strip()[-500:]}")
            if is_last:
                return bytes(content)

    def refuse_unwritten(self, done: ExecResult) -> None:
        """Raises `SandboxRefused` if a command that writes files has failed."""
        if done.exit_code != 0:
            raise SandboxRefused(f"The files cannot be written in the sandbox: {done.stderr.strip()[-500:]}")

    def _unreadable(self, path: str) -> SandboxRefused:
        return SandboxRefused(f"{path} cannot be read: it is not a file of at most {LARGEST_FILE_BYTES} bytes.")


class RemoteProvider(SandboxProvider):
    """Base of providers whose sandboxes are not processes of this one."""

    @abstractmethod
    async def remove(self, sandbox_id: str) -> None:
        """Destroys a sandbox; returns also if it is gone. Raises `SandboxLost`."""


class RemoteSandbox(ShellSandbox):
    """One sandbox. A command that is ended early is killed with its process group, where it has one of its own."""

    def __init__(self, provider: RemoteProvider, sandbox_id: str, spec: SandboxSpec) -> None:
        self._provider = provider
        self._id = sandbox_id
        self._spec = spec

    @property
    def id(self) -> str:
        return self._id

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
        path = f"{_FOLDER}/{uuid4().hex}"
        if stdin:
            await self.write_files({f"{path}.stdin": SandboxFile(stdin)})
        # One that is ended before it begins finds that out: each of the two writes its file before it reads the other.
        start = f"mkdir -p {_FOLDER}; echo $$ > {path}; test ! -e {path}.ended || exit; "
        start += f"cd {shlex.quote(folder)} && " if (folder := cwd or self._spec.workdir) is not None else ""
        start += f"exec < {f'{path}.stdin' if stdin else '/dev/null'}"
        try:
            async with asyncio.timeout(timeout_s):
                done = await self.run_command(start, argv, environment or {}, timeout_s)
        except (SandboxLost, OutOfMemory):
            raise
        except BaseException:
            with suppress(SandboxLost, OutOfMemory):
                await asyncio.shield(asyncio.ensure_future(self._kill(path)))
            raise
        return ExecResult(done.exit_code, _end_of(done.stdout), _end_of(done.stderr))

    async def run_command(
        self, start: str, argv: Sequence[str], environment: Mapping[str, str], timeout_s: float | None
    ) -> ExecResult:
        """Runs a command in the place of a shell that has run the line `start`. Raises what `run_shell` raises."""
        variables = [f"{name}={value}" for name, value in environment.items()]
        return await self.run_shell(f"{start} && exec {shlex.join(['env', *variables, *argv])}", timeout_s)

    async def _kill(self, path: str) -> None:
        """Ends the command that has written its process to the file, or that will."""
        ended = f"mkdir -p {_FOLDER}; p={path}; : > $p.ended"
        await self.run_shell(f"{ended}; kill -9 -$(cat $p) || kill -9 $(cat $p)", CALLS_OF_OURS_S)

    async def snapshot(self) -> str:
        """Raises `SandboxRefused`."""
        raise SandboxRefused(f"The provider {self._provider.name} keeps no snapshots: use the provider local.")

    async def reach(self, base_url: str) -> str:
        """The address itself: `sessions.base_url` must be one that the provider's network reaches."""
        if not self._spec.network:
            raise SandboxRefused(
                f"network_mode is no-network, and a command in a sandbox of {self._provider.name} reaches {base_url} "
                "by its network: use the provider local, or call the service from outside of the sandbox."
            )
        return base_url

    async def close(self) -> None:
        """See `RunningSandbox.close`. A provider that does not answer is tried a few times."""
        await asyncio.shield(asyncio.ensure_future(self._remove()))

    async def _remove(self) -> None:
        try:
            await _REMOVING.copy()(self._provider.remove, self._id)
        except SandboxLost as error:
            logger.warning("The sandbox %s of %s was not destroyed: %s", self._id, self._provider.name, error)


def _end_of(text: str) -> str:
    """The last `LARGEST_OUTPUT_BYTES` of an output."""
    if len(text) * 4 <= LARGEST_OUTPUT_BYTES:
        return text
    return text.encode(errors="replace")[-LARGEST_OUTPUT_BYTES:].decode(errors="replace")


class ReapedProvider(RemoteProvider):
    """Base of providers with a reaper. `options` are the arguments of the subclass, with which that opens it again."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._reaper: subprocess.Popen[bytes] | None = None
        # A process may open several: the end of one is not that of the others.
        self.owner = f"{os.getpid()}-{uuid4().hex}"

    @abstractmethod
    async def ids_of(self, owner: str) -> Sequence[str]:
        """The ids of the sandboxes with the label of this owner. Raises `SandboxLost`."""

    def start_reaper(self) -> None:
        """Starts the reaper, before the first sandbox exists."""
        if self._reaper is None:
            argv = [sys.executable, "-c", _REAPER, self.name, json.dumps(dict(self._options)), self.owner]
            self._reaper = subprocess.Popen(
                ["setsid", "--fork", *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            self._reaper.wait()

    def close(self) -> None:
        """Leaves the remaining sandboxes to the reaper, which destroys them within seconds."""
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            self._reaper = None


async def _remove_all(provider: ReapedProvider, owner: str) -> None:
    for _ in range(_REAPS):
        # Nobody reads what the reaper says. It tries again.
        with suppress(SandboxLost):
            await asyncio.gather(*map(provider.remove, await provider.ids_of(owner)))
        await asyncio.sleep(_REAP_EVERY_S)


def _reap(name: str, options: str, owner: str) -> None:
    """Destroys all at the end of the owner. Takes the provider's name, its options as JSON, and the label."""
    sys.stdin.buffer.read()
    provider = open_provider(name, json.loads(options))
    assert isinstance(provider, ReapedProvider)
    asyncio.run(_remove_all(provider, owner))
