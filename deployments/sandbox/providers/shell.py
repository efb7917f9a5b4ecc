"""Sandboxes of which a provider gives little more than a shell: commands, files and their ends by what a shell can do.

A module of such a provider adds two calls: run a line of shell, put a file.
"""

import asyncio
import base64
import binascii
import shlex
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from uuid import uuid4

from deployments.sandbox.providers.interface import (
    LARGEST_FILE_BYTES,
    LARGEST_OUTPUT_BYTES,
    ExecResult,
    SandboxFile,
    SandboxRefused,
    SandboxSpec,
    tar_of,
    unreadable,
)
from deployments.sandbox.providers.owned import FOLDER, OwnedSandbox

MISSING, NOT_A_FILE = 44, 45
CALLS_OF_OURS_S = 120.0
PART_BYTES = 512 * 1024
LONGEST_SIZE = 18
"""Digits."""


class ShellSandbox(OwnedSandbox):
    """One sandbox. A command that is ended early is killed; what it has started goes on until the sandbox ends."""

    @abstractmethod
    async def run_shell(self, line: str, timeout_s: float | None) -> ExecResult:
        """Runs a line by `sh -c` as root. `timeout_s` is a bound for the provider, above that of the command.

        Raises:
            SandboxLost: the sandbox is gone, or does not answer.
        """

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
        path, stdin_path = await self.with_stdin(stdin)
        variables = [f"{name}={value}" for name, value in (environment or {}).items()]
        folder = cwd or self._spec.workdir
        line = f"mkdir -p {FOLDER}; echo $$ > {path}; "
        line += f"cd {shlex.quote(folder)} && " if folder is not None else ""
        line += f"exec {shlex.join(['env', *variables, *argv])} < {stdin_path}"
        async with self.ended_early(path, timeout_s):
            done = await self.run_shell(line, timeout_s)
        return ExecResult(done.exit_code, end_of(done.stdout), end_of(done.stderr))

    async def kill(self, path: str) -> None:
        """See `OwnedSandbox.kill`. Its process alone."""
        await self.run_shell(f"kill -9 $(cat {path})", CALLS_OF_OURS_S)

    async def write_files(self, files: Mapping[str, SandboxFile]) -> None:
        """See `RunningSandbox.write_files`."""
        archive = f"{FOLDER}/{uuid4().hex}.tar"
        await self.put(archive, await asyncio.to_thread(tar_of, files))
        done = await self.run_shell(f"tar --no-same-owner -xf {archive} -C / && rm {archive}", CALLS_OF_OURS_S)
        if done.exit_code != 0:
            raise SandboxRefused(f"The files cannot be written in the sandbox: {done.stderr.strip()[-500:]}")

    async def read_file(self, path: str) -> bytes | None:
        """See `RunningSandbox.read_file`."""
        quoted = shlex.quote(path)
        line = f"test -e {quoted} || exit {MISSING}; test -f {quoted} || exit {NOT_A_FILE}; wc -c < {quoted}"
        found = await self.run_shell(line, CALLS_OF_OURS_S)
        if found.exit_code == MISSING:
            return None
        size = found.stdout.strip()[:LONGEST_SIZE]
        if found.exit_code != 0 or not size.isdecimal() or int(size) > LARGEST_FILE_BYTES:
            raise unreadable(path)
        # It may grow until it is read.
        content = bytearray()
        is_last = False
        while not is_last:
            part = await self._part(path, len(content))
            content += part
            is_last = len(part) < PART_BYTES
            if len(content) > LARGEST_FILE_BYTES:
                raise unreadable(path)
        if len(content) < int(size):
            raise SandboxRefused(f"{path} cannot be read: {len(content)} of its {size} bytes came out of the sandbox.")
        return bytes(content)

    async def _part(self, path: str, position: int) -> bytes:
        """At most `PART_BYTES` of a file from a position on. Raises `SandboxLost` or `SandboxRefused`."""
        line = f"tail -c +{position + 1} {shlex.quote(path)} | head -c {PART_BYTES} | base64"
        done = await self.run_shell(line, CALLS_OF_OURS_S)
        try:
            part = base64.b64decode(done.stdout)
        except (binascii.Error, ValueError) as error:
            raise SandboxRefused(f"{path} cannot be read: base64 of the sandbox wrote something else.") from error
        if done.exit_code != 0:
            raise SandboxRefused(f"{path} cannot be read: {done.stderr.strip()[-500:]}")
        return part


def refuse_folders(provider: str, spec: SandboxSpec) -> None:
    """Raises `SandboxRefused` for folders of this machine."""
    if spec.read_only_folders:
        raise SandboxRefused(
            f"The provider {provider} is not on this machine, and shows none of its folders: have the image hold what "
            f"is in {', '.join(spec.read_only_folders)}."
        )


def end_of(text: str) -> str:
    """The last `LARGEST_OUTPUT_BYTES` of an output."""
    if len(text) * 4 <= LARGEST_OUTPUT_BYTES:
        return text
    return text.encode(errors="replace")[-LARGEST_OUTPUT_BYTES:].decode(errors="replace")
