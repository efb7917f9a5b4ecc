"""An agent that is a command: a process of its own for each rollout, in a folder or in a sandbox of its own."""

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
import psutil

from deployments.agents.programs import AgentCall, AgentProgram, RunNotes, reward_of
from deployments.agents.settings import CommandSettings
from deployments.failures import AgentFailed, EnvironmentLost, EnvironmentRejected
from deployments.sandbox.interface import MIB, SandboxLost
from deployments.sandbox.launch import held_file
from deployments.sandbox.providers.interface import (
    KILLED,
    ExecResult,
    OutOfMemory,
    RunningSandbox,
    SandboxFile,
    SandboxRefused,
    SandboxSpec,
)
from deployments.sandbox.providers.local import EMPTY_IMAGE, LocalProvider
from deployments.sandbox.supervisor import PipeOutput, ended, start_process

STDERR_BYTES = 16_384
"""Length of the tail of stderr that is kept."""
END_GRACE_S = 0.4
"""Time between the signal that asks a command to end and the one that kills it."""
LARGEST_REWARD_BYTES = 2**16
REWARD_FILE = "reward.json"
SAMPLE_FILE = "sample.json"
TRY_AGAIN_LATER = os.EX_TEMPFAIL
"""The exit code of a command that could not run just now."""
SANDBOX_FOLDER = "/tmp/work"
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class CommandProgram(AgentProgram):
    def __init__(self, settings: CommandSettings) -> None:
        """Raises `ProviderUnusable`."""
        self._settings = settings
        self._variables = {name: os.environ[name] for name in settings.passed_variables if name in os.environ}
        self._provider = LocalProvider() if settings.sandbox else None
        if settings.sandbox:
            self._variables |= {"HOME": SANDBOX_FOLDER, "TMPDIR": SANDBOX_FOLDER}

    async def run(self, call: AgentCall, said: RunNotes) -> dict[str, float]:
        with sandbox_failures("The agent", said):
            sandbox = _ProcessFolder(said) if self._provider is None else await self._provider.open(self._spec())
            folder = sandbox.id if self._provider is None else SANDBOX_FOLDER
            try:
                await run_in_sandbox(self._settings, call, sandbox, folder, said, self._variables)
                try:
                    content = await sandbox.read_file(f"{folder}/{REWARD_FILE}")
                except SandboxRefused as error:
                    raise AgentFailed(f"The file {REWARD_FILE} of the agent cannot be read: {error}") from error
                return {} if content is None else _reward_in(content[:LARGEST_REWARD_BYTES])
            finally:
                await sandbox.close()

    def _spec(self) -> SandboxSpec:
        return SandboxSpec(
            image=EMPTY_IMAGE,
            workdir=SANDBOX_FOLDER,
            memory_mb=psutil.virtual_memory().total // MIB,
            read_only_folders=tuple(self._settings.folders),
        )


class _ProcessFolder(RunningSandbox):
    """A folder of this machine for one command, which runs without walls. Its `id` is its path."""

    def __init__(self, said: RunNotes) -> None:
        self._said = said
        self._held = tempfile.TemporaryDirectory(prefix="rollout-agent-", ignore_cleanup_errors=True)

    @property
    def id(self) -> str:
        return self._held.name

    async def exec(
        self, argv: Sequence[str], *, environment: Mapping[str, str] | None = None, stdin: bytes = b"", **_options: Any
    ) -> ExecResult:
        """See `RunningSandbox.exec`. A negative exit code is that of a signal."""
        # Linux ends the command with the replica, whose event loop has a thread that lives as long as it does.
        argv = ["setpriv", "--pdeathsig", "KILL", "prlimit", "--core=0", *argv]
        stderr = PipeOutput(STDERR_BYTES)
        try:
            with ExitStack() as closing:
                closing.enter_context(stderr)
                files = {"stdin": held_file(closing, stdin), "stdout": subprocess.DEVNULL, "stderr": stderr.fd}
                process = start_process(argv, cwd=self.id, env=environment, start_new_session=True, **files)
                try:
                    code = await ended(process)
                except asyncio.CancelledError:
                    await _end_group(process)
                    raise
                finally:
                    _kill_group(process.pid, signal.SIGKILL)
        finally:
            self._said.heard(stderr.text())
        return ExecResult(code, "", stderr.text())

    async def write_files(self, files: Mapping[str, SandboxFile]) -> None:
        folder = Path(self.id)
        for path, file in files.items():
            (folder / path).write_bytes(file.content)

    async def read_file(self, path: str) -> bytes | None:
        try:
            # Not through a link: the command could name any file of the service by it.
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                return file.read(LARGEST_REWARD_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SandboxRefused(f"{error}.") from error

    async def snapshot(self) -> str:
        raise SandboxRefused("A command without sandbox: true has no snapshots.")

    async def reach(self, base_url: str) -> str:
        return base_url

    async def close(self) -> None:
        await asyncio.shield(asyncio.to_thread(self._held.cleanup))


async def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process group: first by SIGTERM, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _kill_group(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_GRACE_S):
                await ended(process)
                return


def _kill_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _reward_in(content: bytes) -> dict[str, float]:
    """The reward in the file of that name. Raises `AgentFailed`."""
    try:
        return reward_of(orjson.loads(content), f"The file {REWARD_FILE} of the agent")
    except orjson.JSONDecodeError as error:
        raise AgentFailed(f"The file {REWARD_FILE} of the agent is not JSON.") from error


async def run_in_sandbox(
    command: CommandSettings,
    call: AgentCall,
    sandbox: RunningSandbox,
    folder: str,
    said: RunNotes,
    variables: Mapping[str, str] = NO_VARIABLES,
) -> None:
    """Runs the command in the sandbox, beside the session of its run.

    Args:
        folder: of its sample and its reward, in the sandbox.
        variables: further ones, besides those of the settings and of the session.

    Raises:
        AgentFailed: it ended with an exit code.
        EnvironmentLost: it could not run just now, or was killed with its sandbox.
    """
    sample = call.sample_json()
    await sandbox.write_files({f"{folder}/{SAMPLE_FILE}": SandboxFile(sample)})
    base_url = await sandbox.reach(call.base_url)
    environment = {
        **variables,
        **command.environment_variables,
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": call.api_key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": call.api_key,
        "ROLLOUT_SAMPLE_FILE": f"{folder}/{SAMPLE_FILE}",
        "ROLLOUT_REWARD_FILE": f"{folder}/{REWARD_FILE}",
    }
    done = await sandbox.exec(command.argv, environment=environment, stdin=sample)
    said.heard(done.stderr)
    if done.exit_code == TRY_AGAIN_LATER or (done.exit_code == KILLED and command.sandbox):
        raise EnvironmentLost(f"The agent cannot be run just now (exit code {done.exit_code}). {said.sentence}")
    if done.exit_code < 0:
        raise AgentFailed(f"The agent was ended by signal {signal.Signals(-done.exit_code).name}. {said.sentence}")
    if done.exit_code != 0:
        raise AgentFailed(f"The agent ended with exit code {done.exit_code}. {said.sentence}")


@contextmanager
def sandbox_failures(what: str, said: RunNotes) -> Iterator[None]:
    """Raises errors of the sandbox as failures of the rollout. `what` is the subject of their messages."""
    try:
        yield
    except SandboxLost as error:
        raise EnvironmentLost(f"{what} lost its sandbox: {error}") from error
    except OutOfMemory as error:
        raise AgentFailed(f"{error} {said.sentence}".strip()) from error
    except SandboxRefused as error:
        raise EnvironmentRejected(f"{what} cannot be played in this sandbox: {error}") from error
