"""An agent that is a command: a process of its own for each rollout; with limits, maybe in a sandbox."""

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import orjson

from deployments.agents.command_sandbox import CommandLaunch, CommandSandbox
from deployments.agents.programs import AgentCall, AgentProgram, RunNotes, last_of, reward_of
from deployments.agents.settings import CommandSettings
from deployments.failures import AgentFailed, EnvironmentLost

MIB = 2**20
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


class CommandProgram(AgentProgram):
    def __init__(self, settings: CommandSettings) -> None:
        """Raises `SandboxUnusable`."""
        self._settings = settings
        self._sandbox = CommandSandbox(settings) if settings.sandbox else None
        self._passed = {name: os.environ[name] for name in settings.passed_variables if name in os.environ}
        self._limits = ["prlimit", *limits_of(settings)]

    async def run(self, call: AgentCall, said: RunNotes) -> dict[str, float]:
        async with run_folder() as folder:
            (folder / SAMPLE_FILE).write_bytes(call.sample_json())
            code = await self._exit_code(call, folder, said)
            if code == TRY_AGAIN_LATER:
                raise EnvironmentLost(f"The agent cannot be run just now (exit code {code}). {said.sentence}")
            if code != 0:
                raise AgentFailed(f"The agent {describe_exit(code)}. {said.sentence}")
            return reward_in(folder)

    async def _exit_code(self, call: AgentCall, folder: Path, said: RunNotes) -> int:
        argv = [*self._limits, *self._settings.argv]
        async with self._walls(argv, call.base_url, folder) as walls, stderr_tail(said) as stderr:
            environment = {
                **self._passed,
                **self._settings.environment_variables,
                **session_variables(walls.base_url, call.api_key, walls.folder),
                **({"HOME": walls.folder, "TMPDIR": walls.folder} if self._sandbox is not None else {}),
            }
            try:
                with (folder / SAMPLE_FILE).open("rb") as sample:
                    process = start_process(walls, sample.fileno(), stderr, folder, environment)
            finally:
                os.close(stderr)
            try:
                return await exit_code_of(process)
            except asyncio.CancelledError:
                await end_group(process)
                raise
            finally:
                kill_group(process.pid, signal.SIGKILL)

    @asynccontextmanager
    async def _walls(self, argv: Sequence[str], base_url: str, folder: Path) -> AsyncIterator[CommandLaunch]:
        if self._sandbox is not None:
            async with self._sandbox.around(argv, base_url, folder) as walls:
                yield walls
            return
        # Linux ends the command with the replica. The replica's event loop has a thread that lives as long as it does.
        yield CommandLaunch(["setpriv", "--pdeathsig", "KILL", *argv], base_url, str(folder), ())


def start_process(
    walls: CommandLaunch, stdin: int, stderr: int, folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts the process, which takes a few milliseconds. Raises `EnvironmentLost`.

    Not by the event loop: uvloop forks, and gRPC's fork handlers sometimes break the new process. Python's `subprocess`
    does not run them.
    """
    try:
        return subprocess.Popen(
            walls.argv,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            cwd=folder,
            env=environment,
            start_new_session=True,
            pass_fds=walls.fds,
        )
    except OSError as error:
        raise EnvironmentLost(f"The agent's process was not started: {error}.") from error


async def exit_code_of(process: subprocess.Popen[bytes]) -> int:
    """Returns when the process has ended, even if others still hold its inherited files."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    fd = os.pidfd_open(process.pid)
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return process.wait()


@asynccontextmanager
async def stderr_tail(said: RunNotes) -> AsyncIterator[int]:
    """A pipe whose writing end the block gets, and closes. It is read until shortly after the block.

    A process that outlives the command may hold it open.
    """
    reading_end, writing_end = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading_end, "rb", buffering=0)
    )
    reading = asyncio.create_task(keep_tail(reader, said))
    try:
        yield writing_end
    finally:
        await asyncio.wait([reading], timeout=READ_AFTER_END_S)
        reading.cancel()
        transport.close()


async def keep_tail(stderr: asyncio.StreamReader, said: RunNotes) -> None:
    """Reads the stderr of a process and keeps its tail."""
    tail, said.sentence = b"", "It wrote nothing to stderr."
    while part := await stderr.read(STDERR_BYTES):
        tail = (tail + part)[-STDERR_BYTES:]
        if shown := last_of(tail.decode(errors="replace")):
            said.sentence = f"It wrote to stderr last: {shown}"


async def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the process group: first by SIGTERM, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        kill_group(process.pid, number)
        try:
            async with asyncio.timeout(END_GRACE_S):
                await exit_code_of(process)
        except TimeoutError:
            continue
        return


def kill_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def limits_of(settings: CommandSettings) -> list[str]:
    """The arguments of `prlimit`."""
    limits = ["--core=0"]
    if settings.memory_limit_mib is not None:
        limits.append(f"--as={settings.memory_limit_mib * MIB}")
    if settings.processor_time_limit_s is not None:
        limits.append(f"--cpu={settings.processor_time_limit_s}:{settings.processor_time_limit_s + 1}")
    return limits


def session_variables(base_url: str, api_key: str, folder: str) -> Mapping[str, str]:
    """The variables that tell a command its session, its sample, and where to write its reward."""
    return {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": api_key,
        "ROLLOUT_SAMPLE_FILE": f"{folder}/{SAMPLE_FILE}",
        "ROLLOUT_REWARD_FILE": f"{folder}/{REWARD_FILE}",
    }


def reward_in(folder: Path) -> dict[str, float]:
    """The reward that the command has written; empty if it has written none. Raises `AgentFailed`."""
    try:
        # Not through a link: the command could name any file of the service by it.
        opened = os.open(folder / REWARD_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise AgentFailed(f"The file {REWARD_FILE} of the agent cannot be read: {error}.") from error
    with os.fdopen(opened, "rb") as file:
        content = file.read(LARGEST_REWARD_BYTES)
    try:
        return reward_of(orjson.loads(content), f"The file {REWARD_FILE} of the agent")
    except orjson.JSONDecodeError as error:
        raise AgentFailed(f"The file {REWARD_FILE} of the agent is not JSON.") from error


def describe_exit(code: int) -> str:
    return f"ended with exit code {code}" if code > 0 else f"was ended by signal {signal.Signals(-code).name}"


@asynccontextmanager
async def run_folder() -> AsyncIterator[Path]:
    """A folder of one run, which is removed with all that is in it."""
    folder = Path(tempfile.mkdtemp(prefix="rollout-agent-"))
    try:
        yield folder
    finally:
        removing = asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        await asyncio.shield(removing)
