"""An agent that is a command: a process of its own for each rollout, with limits; or a sandbox of its own."""

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import orjson
import psutil

from deployments.agents.programs import AgentCall, AgentProgram, RunNotes, last_of, reward_of
from deployments.agents.settings import CommandSettings
from deployments.failures import AgentFailed, EnvironmentLost, EnvironmentRejected
from deployments.sandbox.interface import MIB, SandboxLost
from deployments.sandbox.providers.interface import (
    KILLED,
    OutOfMemory,
    RunningSandbox,
    SandboxFile,
    SandboxRefused,
    SandboxSpec,
)
from deployments.sandbox.providers.local import EMPTY_IMAGE, LocalProvider
from deployments.sandbox.supervisor import readable

STDERR_BYTES = 16_384
"""Length of the tail of stderr that is kept."""
END_GRACE_S = 0.4
"""Time between the signal that asks a command to end and the one that kills it."""
READ_AFTER_END_S = 0.2
"""How long stderr is read after the end."""
LARGEST_REWARD_BYTES = 2**16
REWARD_FILE = "reward.json"
SAMPLE_FILE = "sample.json"
TRY_AGAIN_LATER = os.EX_TEMPFAIL
"""The exit code of a command that could not run just now."""
SANDBOX_FOLDER = "/tmp/work"
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class CommandProgram(AgentProgram):
    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings
        self._passed = _passed_variables(settings)
        # Linux ends the command with the replica, whose event loop has a thread that lives as long as it does.
        self._argv = ["setpriv", "--pdeathsig", "KILL", "prlimit", *_limits_of(settings), *settings.argv]

    async def run(self, call: AgentCall, said: RunNotes) -> dict[str, float]:
        held = tempfile.TemporaryDirectory(prefix="rollout-agent-", ignore_cleanup_errors=True)
        folder = Path(held.name)
        try:
            (folder / SAMPLE_FILE).write_bytes(call.sample_json())
            code = await self._exit_code(call, folder, said)
            if code == TRY_AGAIN_LATER:
                raise EnvironmentLost(f"The agent cannot be run just now (exit code {code}). {said.sentence}")
            if code != 0:
                raise AgentFailed(f"The agent {_describe_exit(code)}. {said.sentence}")
            return _reward_in(folder)
        finally:
            await asyncio.shield(asyncio.to_thread(held.cleanup))

    async def _exit_code(self, call: AgentCall, folder: Path, said: RunNotes) -> int:
        environment = {
            **self._passed,
            **self._settings.environment_variables,
            **_session_variables(call.base_url, call.api_key, str(folder)),
        }
        with (folder / SAMPLE_FILE).open("rb") as sample:
            process = _start_process(self._argv, sample, folder, environment)
        with ExitStack() as ending:
            ending.callback(_kill_group, process.pid, signal.SIGKILL)
            async with _stderr_tail(process, said):
                try:
                    return await _exit_code_of(process)
                except asyncio.CancelledError:
                    await _end_group(process)
                    raise
                finally:
                    # What holds stderr open ends before its tail is read to the end.
                    ending.close()


def _start_process(
    argv: Sequence[str], stdin: BinaryIO, folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts the process, which takes a few milliseconds. Raises `EnvironmentLost`.

    Not by the event loop: uvloop forks, and gRPC's fork handlers sometimes break the new process. Python's `subprocess`
    does not run them.
    """
    try:
        return subprocess.Popen(
            argv,
            bufsize=0,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentLost(f"The agent's process was not started: {error}.") from error


async def _exit_code_of(process: subprocess.Popen[bytes]) -> int:
    """Returns when the process has ended, even if others still hold its inherited files."""
    fd = os.pidfd_open(process.pid)
    try:
        await readable(fd)
    finally:
        os.close(fd)
    return process.wait()


@asynccontextmanager
async def _stderr_tail(process: subprocess.Popen[bytes], said: RunNotes) -> AsyncIterator[None]:
    """Reads the stderr of a process within the block, and shortly after it: one that outlives it may hold it open."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), process.stderr
    )
    reading = asyncio.create_task(_keep_tail(reader, said))
    try:
        yield
    finally:
        await asyncio.wait([reading], timeout=READ_AFTER_END_S)
        reading.cancel()
        transport.close()


async def _keep_tail(stderr: asyncio.StreamReader, said: RunNotes) -> None:
    """Reads the stderr of a process and keeps its tail."""
    tail, said.sentence = b"", "It wrote nothing to stderr."
    while part := await stderr.read(STDERR_BYTES):
        tail = (tail + part)[-STDERR_BYTES:]
        if shown := last_of(tail.decode(errors="replace")):
            said.sentence = f"It wrote to stderr last: {shown}"


async def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the process group: first by SIGTERM, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _kill_group(process.pid, number)
        try:
            async with asyncio.timeout(END_GRACE_S):
                await _exit_code_of(process)
        except TimeoutError:
            continue
        return


def _kill_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _passed_variables(settings: CommandSettings) -> dict[str, str]:
    """The variables of this process that a command gets too."""
    return {name: os.environ[name] for name in settings.passed_variables if name in os.environ}


def _limits_of(settings: CommandSettings) -> list[str]:
    """The arguments of `prlimit`."""
    limits = ["--core=0"]
    if settings.memory_limit_mib is not None:
        limits.append(f"--as={settings.memory_limit_mib * MIB}")
    if settings.processor_time_limit_s is not None:
        limits.append(f"--cpu={settings.processor_time_limit_s}:{settings.processor_time_limit_s + 1}")
    return limits


def _session_variables(base_url: str, api_key: str, folder: str) -> Mapping[str, str]:
    """The variables that tell a command its session, its sample, and where to write its reward."""
    return {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": api_key,
        "ROLLOUT_SAMPLE_FILE": f"{folder}/{SAMPLE_FILE}",
        "ROLLOUT_REWARD_FILE": f"{folder}/{REWARD_FILE}",
    }


def _reward_in(folder: Path) -> dict[str, float]:
    """The reward that the command has written; empty if it has written none. Raises `AgentFailed`."""
    try:
        # Not through a link: the command could name any file of the service by it.
        opened = os.open(folder / REWARD_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise AgentFailed(f"The file {REWARD_FILE} of the agent cannot be read: {error}.") from error
    with os.fdopen(opened, "rb") as file:
        return _reward_written(file.read(LARGEST_REWARD_BYTES))


def _reward_written(content: bytes) -> dict[str, float]:
    """The reward in the file of that name. Raises `AgentFailed`."""
    try:
        return reward_of(orjson.loads(content), f"The file {REWARD_FILE} of the agent")
    except orjson.JSONDecodeError as error:
        raise AgentFailed(f"The file {REWARD_FILE} of the agent is not JSON.") from error


def _describe_exit(code: int) -> str:
    return f"ended with exit code {code}" if code > 0 else f"was ended by signal {signal.Signals(-code).name}"


class SandboxedCommandProgram(AgentProgram):
    """Runs the command in a sandbox of this machine, which reaches nothing but the service."""

    def __init__(self, settings: CommandSettings) -> None:
        """Raises `ProviderUnusable`."""
        self._settings = settings
        self._provider = LocalProvider()
        self._spec = SandboxSpec(
            image=EMPTY_IMAGE,
            environment={**_passed_variables(settings), "HOME": SANDBOX_FOLDER, "TMPDIR": SANDBOX_FOLDER},
            workdir=SANDBOX_FOLDER,
            # Its settings bound each of its processes.
            memory_mb=psutil.virtual_memory().total // MIB,
            read_only_folders=tuple(settings.folders),
        )

    async def run(self, call: AgentCall, said: RunNotes) -> dict[str, float]:
        with sandbox_failures("The agent", said):
            sandbox = await self._provider.open(self._spec)
            try:
                await run_in_sandbox(self._settings, call, sandbox, SANDBOX_FOLDER, said)
                try:
                    content = await sandbox.read_file(f"{SANDBOX_FOLDER}/{REWARD_FILE}")
                except SandboxRefused as error:
                    raise AgentFailed(f"The file {REWARD_FILE} of the agent cannot be read: {error}") from error
                return {} if content is None else _reward_written(content[:LARGEST_REWARD_BYTES])
            finally:
                await sandbox.close()


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
        EnvironmentLost: it could not run just now, or was killed.
    """
    sample = call.sample_json()
    await sandbox.write_files({f"{folder}/{SAMPLE_FILE}": SandboxFile(sample)})
    base_url = await sandbox.reach(call.base_url)
    of_session = _session_variables(base_url, call.api_key, folder)
    environment = {**command.environment_variables, **of_session, **variables}
    limited = command.memory_limit_mib is not None or command.processor_time_limit_s is not None
    argv = [*(["prlimit", *_limits_of(command)] if limited else []), *command.argv]
    done = await sandbox.exec(argv, environment=environment, stdin=sample)
    shown = last_of(done.stderr)
    said.sentence = f"It wrote to stderr last: {shown}" if shown else "It wrote nothing to stderr."
    if done.exit_code in (TRY_AGAIN_LATER, KILLED):
        raise EnvironmentLost(f"The agent could not run to its end (exit code {done.exit_code}). {said.sentence}")
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
